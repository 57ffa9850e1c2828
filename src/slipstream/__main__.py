"""`python -m slipstream`: the same as the command `slipstream`."""

from slipstream.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
