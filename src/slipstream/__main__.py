"""`python -m slipstream`, and the entry point of the command `slipstream`. An interrupt is quiet
even during imports."""


def command() -> int:
    try:
        from slipstream.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(command())
