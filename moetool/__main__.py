"""The console entry, and `python -m moetool` where the script is not on the path."""

from moetool.cli import interrupt


def main() -> None:
    """Run the command line; see `moetool.cli.main.main`."""
    interrupt.ends_process()  # the imports take a third of a second
    from moetool.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
