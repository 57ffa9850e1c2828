"""The engines that a workload can be run on: Slipstream in this process, transformers, llama.cpp, OpenVINO, any OpenAI endpoint."""
