"""Settings and arguments of other engines: our nearest equivalent, or the reason why they are not needed here."""

from __future__ import annotations

OTHERS = {
    "guided_decoding": "structured_outputs",
    "penalty_alpha": "no_repeat_ngram_size or dry_multiplier (there is no contrastive search)",
    "max_new_tokens": "max_tokens",
    "do_sample": "temperature (0: the likeliest token)",
    "use_beam_search": "LLM.beam_search",
    "num_beams": "LLM.beam_search, with BeamSearchParams(beam_width=…)",
    "output_kind": "AsyncLLM, whose answers are streamed",
    "stop_strings": "stop",
    "num_return_sequences": "n",
    "logprob_token_ids": "logprobs, of the likeliest tokens",
    "prompt_logprob_token_ids": "prompt_logprobs, of the likeliest tokens",
    "prompt_logprob_start": "prompt_logprobs, of the whole prompt",
    "flat_logprobs": "logprobs",
    "repetition_detection": "no_repeat_ngram_size",
    "structural_tag": "grammar",
    "disable_additional_properties": "json, whose schema may say additionalProperties: false",
    "trace_decode_token_ids": "allowed_token_ids, or a prompt that ends with those tokens",
}
"""Arguments of vLLM and transformers, and our nearest equivalent."""


NO_ARGUMENTS = {
    "": {  # of methods of LLM
        "tokenization_kwargs": "leave it out: SamplingParams.truncate_prompt_tokens cuts prompts, truncate=True other texts",
        "mm_processor_kwargs": "leave it out: the detail of an image_url says how finely a picture is read",
        "chat_template_content_format": "leave it out: the chat template tells which contents it takes",
        "concurrency_limit": "leave it out: max_num_seqs bounds the sequences of a step",
    },
    "SamplingParams": {
        "watermarking": "leave it out: answers carry no watermark",
        "stream_interval": "leave it out: each step's tokens are sent at once",
        "skip_clone": "leave it out: parameters are frozen, and never copied",
        "output_text_buffer_length": "leave it out: text that may begin a stop string is held back anyway",
        "extra_args": "leave it out: every parameter here has a name of its own (help(SamplingParams))",
        "skip_reading_prefix_cache": "leave it out: enable_prefix_caching=False turns the cache off",
        "routed_experts_prompt_start": "leave it out: an answer has the experts of all its tokens",
    },
    "BeamSearchParams": {
        "temperature": "leave it out: the likeliest continuations are kept, and none is drawn",
        "include_stop_str_in_output": "leave it out: beams end at the model's end of text, which is no part of them",
        "structured_outputs": "leave it out: SamplingParams has it, with n and best_of for several answers",
        "skip_special_tokens": "leave it out: special tokens are no part of the text",
        "allowed_token_ids": "leave it out: SamplingParams has it",
    },
}
"""Arguments of vLLM that are not needed here, with the reason, by the class that has them."""


def asks_nothing(name: str, value: object, owner: str) -> bool:
    """Whether an argument of another engine has the value that means "off", such as `guided_decoding=None`. transformers'
    `do_sample=False` is none: it asks for the likeliest tokens."""
    known = name in OTHERS or name in NO_ARGUMENTS.get(owner, {})
    return (
        known
        and name != "do_sample"
        and (
            value is None
            or value is False
            or (isinstance(value, str | dict | list) and value in ({}, [], "auto"))
        )
    )


METHODS = {
    "apply_model": "no code of a caller runs in the model (docs/extending.md)",
    "collective_rpc": "ranks take no calls from outside (docs/parallelism.md)",
    "enqueue": "use LLM.stream, or AsyncLLM, whose requests run at the same time",
    "enqueue_chat": "use LLM.stream, or AsyncLLM, whose requests run at the same time",
    "wait_for_completion": "LLM.generate and LLM.chat return when all answers are there",
    "get_metrics": "use LLM.stats(); a server has /metrics",
    "get_world_size": "LLM.config.parallel has the sizes of an engine with several ranks; without them it is 1",
    "llm_engine": "LLM has what it has: config, stats(), get_tokenizer(), stream()",
    "model_config": "LLM.config.model has max_model_len, dtype and others",
    "vllm_config": "LLM.config has every setting",
    "preprocess_chat": "use LLM.get_tokenizer().apply_chat_template(messages)",
    "preprocess_cmpl": "use LLM.get_tokenizer().encode(text)",
    "renderer": "use LLM.get_tokenizer(), which encodes texts and applies the chat template",
    "reward": "use LLM.classify, or LLM.encode for vectors",
    "set_tokenizer": "use LLM(tokenizer=…)",
    "supported_tasks": "try the call: one that the model can't answer names those that it can",
    "reset_encoder_cache": "leave it out: image_cache_bytes bounds it, and a picture is known by its hash",
    "release_kv_cache_memory": "use LLM.sleep(1), on a GPU LLM.sleep(2), and LLM.wake_up() before the next request",
    "reset_mm_cache": "leave it out: image_cache_bytes bounds it, and a picture is known by its hash",
    "start_profile": "run torch.profiler around LLM.generate: with one rank the engine is in this process",
    "stop_profile": "run torch.profiler around LLM.generate: with one rank the engine is in this process",
}
"""Methods of vLLM's LLM that ours lacks, and what to do instead."""


FIELDS = {
    "lora_request": "the RequestOutput has it",
    "prompt_token_id_logprobs": "prompt_logprobs has the likeliest tokens' at each place",
    "num_cache_creation_tokens": "num_cached_tokens are those that were cached; a server's usage has cache_write_tokens",
    "multi_modal_placeholders": "prompt_token_ids has the placeholders' tokens",
    "num_external_computed_tokens": "num_cached_tokens are those that were cached",
    "prompt_routed_experts": "routed_experts of the answer has those of the prompt, too",
    "first_scheduled_time": "arrival_time and first_token_time, which enclose it",
    "queued_ts": "arrival_time",
    "scheduled_ts": "arrival_time and first_token_time, which enclose it",
    "time_in_queue": "first_token_latency, which includes it",
    "sampling_mask": "there is no such feature here",
    "spec_decode_metrics": "num_drafted and num_accepted of the same object have them",
}
"""Fields of vLLM's answers that ours lack, and what to read instead."""


SETTINGS = {
    "swap_space": "kv_host_bytes",
    "cpu_offload_gb": "weights_bytes",
    "enable_expert_parallel": "expert_parallel_size",
    "device_map": "device",
    "torch_dtype": "dtype",
    "n_ctx": "max_model_len",
    "ctx_size": "max_model_len",
    "context_length": "max_model_len",
    "max_total_tokens": "max_model_len",
    "max_seq_len": "max_model_len",
    "n_threads": "num_threads",
    "threads": "num_threads",
    "parallel": "max_num_seqs",
    "quantize": "quantization",
    "num_shard": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "mem_fraction_static": "gpu_memory_utilization",
    "draft_model": "speculative_model",
    "model_draft": "speculative_model",
    "limit_mm_per_prompt": "max_images",
    "mm_processor_cache_gb": "image_cache_bytes",
    "pp_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "ep_size": "expert_parallel_size",
    "ep": "expert_parallel_size",
    "context_parallel": "context_parallel_size",
    "decode_context_parallel_size": "context_parallel_size",
    "prefill_context_parallel_size": "context_parallel_size",
    "cp_size": "context_parallel_size",
    "cp": "context_parallel_size",
    "dcp_size": "context_parallel_size",
    "dcp": "context_parallel_size",
    "master_addr": "rank_address",
    "dist_init_addr": "rank_address",
    "max_num_queued_reqs": "max_queue",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "kv_offloading_size": "kv_host_bytes",
    "max_num_scheduled_tokens": "max_num_batched_tokens",
    "max_num_active_seqs": "max_num_seqs",
    "long_prefill_token_threshold": "max_num_mixed_tokens",
    "num_gpu_blocks_override": "kv_cache_bytes",
    "spec_model": "speculative_model",
    "spec_tokens": "num_speculative_tokens",
    "spec_method": "speculative_config",
    "otlp_traces_endpoint": "otlp_endpoint",
    "shutdown_timeout": "drain_timeout",
    "allowed_origins": "cors_origin",
    "allowed_media_domains": "allowed_media_hosts",
    "master_port": "rank_address",
    "data_parallel_address": "rank_address",
    "moe_backend": "kernels",
    "linear_backend": "kernels",
    "attention_backend": "kernels",
}
"""Settings of these and of llama.cpp, SGLang and text-generation-inference, and our nearest. On the
command line they are options."""


VALUES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "full": "float32",
}
"""Values of settings in other engines, and ours."""


_READ = "leave it out: the model's task is read from its files, and every model gives vectors"


_CONFIG = "leave it out: the model's config.json has it"


_REPLICAS = "use `slipstream fleet` for several replicas (docs/fleet.md); expert_parallel_size alone distributes requests"


_METRICS = "leave it out: /metrics is always on"


_GENERATION = (
    "leave it out: the model's generation_config.json has it, and a request's own fields go first"
)


_ALWAYS = "leave it out: it is always on"


_LOG = "leave it out: the server's log has its own form (--log-format)"


_BALANCED = (
    "leave it out: experts are dealt out to ranks by expert_parallel_size (docs/parallelism.md)"
)


_CONTEXT = "leave it out: long prompts are split over steps by enable_chunked_prefill, and over context_parallel_size devices"


_PRECISION = "leave it out: kernels are chosen for the device and the model"


_MAMBA = "leave it out: state_slots sizes the memory of recurrent layers (docs/recurrent.md)"


_MODALITY = (
    "leave it out: max_images and preprocessor_config.json decide about pictures (docs/vision.md)"
)


_OFFLOAD = "leave it out: cpu_layers, host_experts and weights_bytes keep weights in the host's memory (docs/offload.md)"


_TRANSFER = "leave it out: kv_host_bytes and kv_disk_bytes keep blocks of the cache outside the device (docs/kv-tiers.md)"


_LORA = "leave it out: an adapter's own adapter_config.json has it (docs/adapters.md)"


_REVISION = (
    "leave it out: give the model's folder; `slipstream pull` fetches a name's newest revision"
)


_PROFILE = "leave it out: `slipstream bench` measures, and /metrics and --otlp-endpoint report"


_GRAPHS = (
    "leave it out: CUDA graphs are captured for the steps that occur; enforce_eager turns them off"
)


_GPU_LAYERS = "leave it out: a GPU holds all but cpu_layers; without a GPU the CPU computes all (device='cuda' refuses)"


_NOTHING = "leave it out: there is no such feature here"


ONLY_PYTHON = {
    "enable_return_routed_experts": "leave it out: an answer of LLM(...) has its experts, and no "
    "route or verb returns them"
}
"""Engine settings that are not options of the command line or of a fleet, with the reason."""


_BY_REASON: dict[str, str] = {
    _BALANCED: """
        enable_eplb eplb_config enable_elastic_ep expert_placement_strategy
        all2all_backend enable_dbo enable_ep_weight_filter elastic_ep_max_dp_size
        dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size
    """,
    _REPLICAS: """
        data_parallel_size_local data_parallel_rank data_parallel_start_rank
        data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_multi_port_external_lb data_parallel_backend
        data_parallel_supervisor_port dp_supervisor_probe_interval_s
        dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold
        dp_sync_interval disable_nccl_for_dp_synchronization enable_scale_out
        enable_fault_tolerance fault_tolerance_config watchdog_config
    """,
    _CONTEXT: """
        dcp_comm_backend dcp_q_replicate enable_hc_sp dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size long_prefill_token_threshold_adaptive
        scheduler_reserve_full_isl prefill_schedule_interval
    """,
    _PRECISION: """
        kernel_config monokernel attention_config ir_op_priority
        sparse_indexer_topk_backend disable_cascade_attn disable_custom_all_reduce
        use_fp64_gumbel enable_flashinfer_autotune gdn_prefill_backend
        kda_prefill_backend kda_decode_backend
        model_impl disable_hybrid_kv_cache_manager kv_cache_dtype_skip_layers
        enable_batch_sharded_sampling enable_shm_tensor_arena kv_sharing_fast_prefill
        additional_config
    """,
    _MAMBA: """
        mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint mamba_config mamba_backend
        mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds replayssm_buffer_len use_replayssm swa_bounded_replay
    """,
    _MODALITY: """
        enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_cache_type
        mm_hasher_algorithm mm_encoder_only mm_shm_cache_max_object_size_mb
        mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin renderer_num_workers skip_mm_profiling
        video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device
        mm_ipc_gpu_memory_gb mm_device_do_normalize enable_mm_processor_stats
        disable_chunked_mm_input trust_request_mm_kwargs io_processor_plugin
    """,
    _OFFLOAD: """
        cpu_offload_params offload_backend offload_group_size offload_num_in_group
        offload_prefetch_step offload_params
    """,
    _TRANSFER: """
        kv_transfer_config kv_offloading_backend ec_transfer_config ec_manager_config
        prefix_cache_retention_interval
    """,
    _LORA: """
        lora_dtype lora_target_modules specialize_active_lora enable_moe_shared_loras
        max_lora_cls_labels default_mm_loras fully_sharded_loras
        enable_tower_connector_lora enable_mixed_moe_lora_format
    """,
    _REVISION: """
        revision code_revision tokenizer_revision hf_config_path model_weights
    """,
    _CONFIG: """
        config_format model_class_overrides pooler_config quantization_config
        allow_deprecated_quantization
    """,
    _PROFILE: """
        profiler_config enable_layerwise_nvtx_tracing collect_detailed_traces
        show_hidden_metrics_for_version cudagraph_metrics enable_mfu_metrics
        enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose
        custom_histogram_buckets kv_cache_metrics kv_cache_metrics_sample
        per_request_spec_decode_metrics enable_per_request_metrics
        enable_server_load_tracking ray_workers_use_nsight enable_trace_replay
    """,
    _LOG: """
        disable_uvicorn_access_log disable_access_log_for_endpoints
        log_config_file logging_config log_level aggregate_engine_logging
        enable_log_outputs enable_log_deltas max_log_len log_error_stack
    """,
    _GRAPHS: """
        cudagraph_capture_sizes max_cudagraph_capture_size sleep_mode_offload_cudagraph
    """,
    _ALWAYS: """
        enable_prompt_tokens_details enable_request_id_headers
        exclude_tools_when_tool_choice_none fingerprint_mode enable_offline_docs
        use_tqdm_on_load fingerprint_value
    """,
    _NOTHING: """
        watermark watermark_config diffusion_config engram_config enable_prompt_embeds
        return_sampling_mask aux_output_config tokens_only
        middleware uds root_path tool_server cohere_format enable_cumem_allocator
        cohere_is_reasoning_model anthropic_disabled_thinking_effort
        enable_flash_late_interaction fail_on_environ_validation
    """,
    "leave it out: the role, or continue_final_message, is decided in each request's body": """
        response_role
    """,
    "leave it out: chat_template_kwargs is decided in each request's body": """
        default_chat_template_kwargs reasoning_effort_map trust_request_chat_template
    """,
    "leave it out: thinking_token_budget is decided in each request's body": """
        reasoning_config
    """,
    "leave it out: structured_outputs is decided in each request's body": """
        structured_outputs_config
    """,
    "leave it out: return_tokens_as_token_ids is decided in each request's body": """
        return_tokens_as_token_ids
    """,
    "leave it out: stream_options.include_usage is decided in each request's body": """
        enable_force_include_usage
    """,
    "leave it out: log-probabilities are the model's own, before temperature": """
        logprobs_mode
    """,
    "leave it out: max_queue bounds the requests that wait": """
        max_num_queued_tokens
    """,
    "leave it out: ranks find each other by rank_address, and a rank that is lost ends the engine": """
        distributed_timeout_seconds cpu_distributed_timeout_seconds
        enable_nccl_comm_suspend
    """,
    "leave it out: ranks take the GPUs that CUDA_VISIBLE_DEVICES leaves, in order": """
        device_ids
    """,
    "leave it out: start the server under numactl": """
        numa_bind numa_bind_nodes numa_bind_cpus
    """,
    "leave it out: a layer's window is the model's; a max_model_len below it has the same effect": """
        disable_sliding_window
    """,
    "leave it out: TLS is --ssl-certfile and --ssl-keyfile; a proxy in front does the rest": """
        ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh
        h11_max_incomplete_event_size h11_max_header_count
    """,
    "leave it out: the next step is always planned while one runs": """
        async_scheduling
    """,
    "leave it out: the scheduler and the worker are part of the engine (docs/extending.md)": """
        scheduler_cls worker_cls worker_extension_cls
    """,
    "leave it out: cached prefixes are whole blocks, named by BLAKE2b": """
        prefix_caching_hash_algo prefix_match_unit
    """,
    "leave it out: `slipstream serve --enable-weight-updates` takes them over HTTP (docs/weights.md)": """
        weight_transfer_config
    """,
    "leave it out: HF_TOKEN in the environment, or `hf auth login`, is used": """
        hf_token
    """,
    "leave it out: --cors-origin names the pages that may ask, with any method and header and without credentials": """
        allow_credentials allowed_methods allowed_headers
    """,
    "leave it out: formats are data in the code (docs/extending.md); --tool-call-parser and --reasoning-parser choose one": """
        tool_parser_plugin reasoning_parser_plugin chat_template_content_format
    """,
    "leave it out: a tool's own `strict` and tool_choice decide what is enforced": """
        tool_strict_level
    """,
    "leave it out: weights are read by the checkpoint's own index; load_format says how": """
        safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size model_loader_extra_config ignore_patterns
        pt_load_map_location max_parallel_loading_workers
    """,
    "leave it out: each step's tokens are sent at once": """
        stream_interval
    """,
    "leave it out: a stream that is silent for 15 seconds says `: ping`": """
        sse_keep_alive_interval
    """,
    "leave it out: --enable-sleep-mode has two levels (docs/server/operations.md)": """
        sleep_mode_backend sleep_preserve_parameter_names
    """,
    "leave it out: /docs is always there": """
        disable_fastapi_docs
    """,
    "leave it out: /tokenize and /props say what the tokenizer is": """
        enable_tokenizer_info_endpoint
    """,
}
"""Settings of vLLM by the reason why they are not needed here."""


NEEDLESS = {
    **{name: reason for reason, names in _BY_REASON.items() for name in names.split()},
    "trust_remote_code": "leave it out: a checkpoint's own code is never run",
    "distributed_executor_backend": "leave it out: ranks are processes (docs/parallelism.md)",
    **dict.fromkeys(
        ("disable_log_requests", "enable_log_requests"),
        "leave it out: the log has a line a request, without its texts",
    ),
    "enable_auto_tool_choice": "leave it out: calls are read wherever the chat template knows tools",
    "task": _READ,
    "runner": _READ,
    "convert": _READ,
    "embedding": _READ,
    "embeddings": _READ,
    "reranking": _READ,
    "rope_scaling": _CONFIG,
    "hf_overrides": _CONFIG,
    "tokenizer_mode": "leave it out: the tokenizer is the checkpoint's",
    "generation_config": _GENERATION,
    "override_generation_config": _GENERATION,
    "compilation_config": "leave it out: enforce_eager turns CUDA graphs off",
    "guided_decoding_backend": "leave it out: grammars are llguidance's",
    "max_logprobs": "leave it out: a request may ask for up to 20",
    **dict.fromkeys(("data_parallel_size", "dp_size", "dp"), _REPLICAS),
    **dict.fromkeys(("disable_log_stats", "enable_metrics", "metrics"), _METRICS),
    "uvicorn_log_level": "leave it out: the server logs a line a request and what goes wrong, at one level (--log-format)",
    "performance_mode": "leave it out: latency and throughput are served alike; `slipstream optimize` searches for a load",
    "optimization_level": "leave it out: kernels and graphs are the same at each level; enforce_eager turns CUDA graphs off",
    "nnodes": "leave it out: rank_address lets hosts meet, and local_ranks are those of this one (docs/parallelism.md)",
    "node_rank": "leave it out: ranks are numbered in the order in which they join (docs/parallelism.md)",
    "mm_processor_kwargs": "leave it out: preprocessor_config.json has it, and a request's `detail` reads a picture smaller",
    "language_model_only": "max_images=0 leaves the image encoder out",
    "enable_multimodal": "leave it out: a model with an image encoder takes pictures unless max_images is 0",
    "allowed_local_media_path": "leave it out: no files of the server are read; send pictures as data: URIs",
    "n_gpu_layers": _GPU_LAYERS,
    "gpu_layers": _GPU_LAYERS,
    "flash_attn": "leave it out: attention never holds its whole matrix",
    "mmproj": "leave it out: image encoders are read from safetensors",
}
"""Settings of other engines that are not needed here, with the reason."""


ADVICE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("disable_log_stats", "embedding", "embeddings", "enable_flashinfer_autotune"), ("true",)
    ),
    "runner": ("auto", "generate", "pooling"),
    "task": ("auto", "generate", "embed", "embedding"),
    "convert": ("auto", "none", "embed"),
    "performance_mode": ("balanced", "interactivity", "throughput"),
    "optimization_level": ("1", "2", "3"),
    "uvicorn_log_level": ("debug", "info", "warning", "error", "critical", "trace"),
    "n_gpu_layers": ("all", "auto", "99", "999", "-1"),
    "gpu_layers": ("all", "auto", "99", "999", "-1"),
}
"""Unneeded settings with values that are only advice: they are accepted, and the log says what is done instead."""


TAKEN: dict[str, tuple[str, ...]] = {
    **ADVICE,
    **dict.fromkeys(
        (
            "enable_auto_tool_choice",
            "async_scheduling",
            "enable_prompt_tokens_details",
            "enable_request_id_headers",
            "enable_offline_docs",
            "use_tqdm_on_load",
            "disable_log_requests",
            "enable_metrics",
            "metrics",
            "exclude_tools_when_tool_choice_none",
            "enable_multimodal",
        ),
        ("true",),
    ),
    "enable_log_requests": ("false",),
    "trust_remote_code": ("false",),
    "flash_attn": ("on", "auto"),
    "tokenizer_mode": ("auto", "hf"),
    "generation_config": ("auto",),
    "config_format": ("auto", "hf"),
    "model_impl": ("auto",),
    "chat_template_content_format": ("auto",),
    "response_role": ("assistant",),
    "distributed_executor_backend": ("mp", "uni"),
    "guided_decoding_backend": ("auto", "guidance"),
    "logprobs_mode": ("raw_logprobs",),
    "max_logprobs": ("20",),
    "safetensors_load_strategy": ("lazy", "auto"),
    "data_parallel_size": ("1",),
    "nnodes": ("1",),
    "node_rank": ("0",),
}
"""Unneeded settings with values that are only advice, or that request what is done anyway: they are
accepted and logged. Other values are errors."""


OF_SERVE = (
    *("served_model_name", "enable_sleep_mode", "logits_processors", "reasoning_parser"),
    *("enable_weight_updates", "weights_folder"),
    *("tool_call_parser", "otlp_endpoint", "drain_timeout", "cors_origin", "allowed_media_hosts"),
)
"""Options of `slipstream serve` that are not engine settings."""
