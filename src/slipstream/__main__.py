"""`python -m slipstream`, and where the command `slipstream` begins: an interrupt is quiet from the first import on."""


def command() -> int:
    try:
        from slipstream.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(command())
