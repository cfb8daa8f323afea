"""`python -m reft`: the command line, for launchers that start modules (`torchrun -m reft check`)."""

from reft._cli.main import main

if __name__ == "__main__":
    main()
