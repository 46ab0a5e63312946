"""`python -m moetool`, where the console script is not on the path."""

from moetool.cli.main import main

if __name__ == "__main__":
    main()
