"""`python -m ranvier` is `ranvier`."""

from ranvier.cli import main

if __name__ == "__main__":
    main()
