"""A torch.compile backend (inductor's) that counts graphs and the FLOPs of every graph it runs.

FlopCounterMode around a compiled call makes Dynamo run the function in eager mode instead. So the counter runs inside
the compiled function.
"""

from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.utils.flop_counter import FlopCounterMode


class CountingBackend:
    def __init__(self):
        self.graphs = 0
        self.flops = 0

    def __call__(self, graph_module, example_inputs):
        self.graphs += 1
        return compile_fx(graph_module, example_inputs, inner_compile=self.compile_and_count)

    def compile_and_count(self, graph_module, example_inputs, **options):
        compiled = compile_fx_inner(graph_module, example_inputs, **options)

        def call(args):
            with FlopCounterMode(display=False) as counter:
                results = compiled(args)
            self.flops += counter.get_total_flops()
            return results

        call._boxed_call = True
        return call
