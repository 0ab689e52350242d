"""`python -m orbax_explicit` is the command line."""

from orbax_explicit.cli import main

if __name__ == "__main__":
    main()
