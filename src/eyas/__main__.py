"""python -m eyas: the command line."""

from eyas.cli import main

if __name__ == "__main__":
    main()
