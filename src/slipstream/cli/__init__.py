"""The command `slipstream`. Each verb has a file with `add_arguments(parser)` and `run(args)`;
`main` imports it when it is named."""
