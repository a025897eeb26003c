"""How a version leaves the checkout. CONTRIBUTING.md has the order.

kernel_hub.py    the package as Hugging Face's `kernels` loads it
smoke.py         tests of a wheel, in an environment of its own
"""
