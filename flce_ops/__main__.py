"""`python -m flce_ops`: the commands that there are, a line each."""

from .version import __version__

COMMANDS = f"""\
{__package__} {__version__}

  python -m {__package__}.check      errors here and, on a GPU, time and memory beside torch.compile: a minute
  python -m {__package__}.plan       memory and time of a training step, by formula, from its sizes and a GPU's name

In a checkout of the repository:

  python -m examples.train_gpt  trains a small GPT with this loss and with F.cross_entropy: two minutes (make demo)
  python -m benchmarks          speed, memory and errors of a step beside other libraries

--help after a command lists its options."""


def main() -> None:
    print(COMMANDS)


if __name__ == "__main__":
    main()
