"""The engines that a workload can be run on: Slipstream in this process, transformers, any OpenAI endpoint."""
