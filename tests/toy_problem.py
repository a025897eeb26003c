"""A toy problem for the benchmarks on a CPU, its losses by dense torch, and the rows that a run writes."""

import csv

import torch

from benchmarks.__main__ import main
from benchmarks.data import make_problem
from benchmarks.modes import MODES, prepare
from benchmarks.shapes import Shape

CPU = torch.device("cpu")
TOY = Shape(60, 33, 501)  # N tokens, D hidden, V vocabulary


def make_toy(mode="fwd_bwd", dtype=torch.float32):
    problem = make_problem(TOY, dtype=dtype, device=CPU, seed=0)
    prepare(problem, MODES[mode])
    return problem


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def dense_losses(input, linear_weight, target):
    return torch.nn.functional.cross_entropy(input @ linear_weight.T, target, reduction="none")


def dense_entropy(input, linear_weight):
    return torch.distributions.Categorical(logits=input @ linear_weight.T).entropy()


def run_toy(tmp_path, *options):
    argv = ["--modes", "fwd_bwd,none", "--rounds", "1", "--ms", "1", "--dtype", "float32", "--device", "cpu"]
    return rows_of(main([*argv, "--seed", "3", "--out", str(tmp_path), *options]))
