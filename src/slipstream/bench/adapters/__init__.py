"""The engines that a workload runs on: Slipstream in this process, transformers, llama.cpp, OpenVINO, any OpenAI endpoint."""
