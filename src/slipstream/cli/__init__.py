"""The command `slipstream`: one file a verb, each with `add_arguments(parser)` and `run(args)`; `main` imports it when it is named."""
