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
    void         written by hand: its line went out of the package before it was run

A few tests run first, tests that killed other mutants of the file before all. A mutant that they all leave alive meets
every case of its tests, of which the map has a sample. Limits are seconds of a process's own CPU time, so load on the
machine decides nothing.

Tests run on the CPU, kernels in Triton's interpreter. `--again CSV` takes what was not killed once more, with
`--tests FILE` against other tests than the map's: so a new test is shown to kill. `--budget 25` is a first pass: tests
of 25 seconds a mutant, and what survives these stays unfinished. `--map --tests FILE` measures these files again and
keeps the map of the others.

mutants.csv has 106 mutants drawn at fef8f21 over aten, distributed, entry, functional, math, meta, objectives, ops and
triton (no launch, no sparse) with seeds 1 and 2, and 389 drawn at 7f4aea3 over the whole package with seed 3. 13 are
void. Of the other 482 mutants 444 are killed, 35 are equivalent and 3 survive. The column `reason` says why a mutant is
equivalent or survives. map.json is of 139 test files.

Why not mutmut or cosmic-ray, not even for plain Python. mutmut 3.8 leaves every decorated function alone, so the jit
functions, the functions of rows and the fake kernels; and it puts a dispatcher around the others, which a full graph of
torch.compile, a signature read for a schema and `inspect.getsource` meet. cosmic-ray 8.7 edits files, as is done here,
but runs one fixed command in a new process for each mutant: importing torch and running the suite, not the tests of a
line. Neither swaps arguments, drops masks or reduces over another dimension.
"""
