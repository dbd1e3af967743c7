"""`python -m gpssm` is the command line."""

from gpssm.cli import main

if __name__ == "__main__":
    main()
