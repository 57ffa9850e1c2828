"""The command `slipstream`: one file a verb, each with `register(sub)`; what is heavy is imported in its handler."""
