"""The command `slipstream`. Each verb has a file with `add_arguments(parser)` and `run(args)`,
which `main` imports when the verb is used."""
