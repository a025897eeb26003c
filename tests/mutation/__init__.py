"""Mutation testing: do the tests notice a single fault? `python -m tests.mutation --mutants 400 --seed 1 --jobs 16`

    faults.py    the single faults of a source file, by its syntax tree
    map.py       which tests run which lines; map.json is it
    lines.py     which lines a test runs: a pytest plugin and a tracer
    measure.py   makes the map: `--map`
    server.py    runs tests in a fork of a process that has imported torch
    run.py       draws mutants, runs their tests, writes the CSV

A mutant is the package with one fault: another operator, a constant one larger, two arguments swapped, a mask or a
statement left out. Mutants are drawn at random with a seed: a file by its number of statements, then a kind of fault,
then a place. Each is applied in a temporary copy of the repository, never in the checkout. The tests that run its line
are run, quickest first, until one fails.

    killed       a test fails, which passes without the fault (that is tried, once a test)
    hangs        a test does not end: counts as killed
    survived     no test that the map names for the line fails
    not run      no test on this machine runs the line: what a GPU alone runs, and holes
    equivalent   written by hand with its reason: no result, error or promise differs from the right program's

Tests run on the CPU, kernels in Triton's interpreter. `--again CSV` takes what was not killed once more, with
`--tests FILE` against other tests than the map's: so a new test is shown to kill.

mutants.csv has 106 mutants drawn over aten, distributed, entry, functional, math, meta, objectives, ops and triton (no
launch, no sparse) with seeds 1 and 2: 90 killed, 9 of these by tests that were written for them, 6 equivalent, 8
survive, 2 wait for tests of several ranks. So 90 of the 98 that are judged and not equivalent are killed, 92 %. Of the
eight, three show on a GPU alone, three change time alone and two memory alone; the column `reason` says which. map.json
is of 60 test files: integrations, compile and most of layouts are added by `--map` on a machine with more cores.

Why not mutmut or cosmic-ray, not even for plain Python. mutmut 3.8 leaves every decorated function alone, so the jit
functions, the functions of rows and the fake kernels; and it puts a dispatcher around the others, which a full graph of
torch.compile, a signature read for a schema and `inspect.getsource` meet. cosmic-ray 8.7 edits files, as is done here,
but runs one fixed command in a new process for each mutant: importing torch and running the suite, not the tests of a
line. Neither swaps arguments, drops masks or reduces over another dimension.
"""
