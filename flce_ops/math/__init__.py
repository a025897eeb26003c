"""The mathematics, in torch alone: losses, divergences, their derivatives and reductions."""
