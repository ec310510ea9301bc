"""Refuses unsupported options of vLLM's `LLM`, or ignores them with a warning."""

from collections.abc import Mapping
from typing import Any

from specjax.checks import warn
from specjax.vllm_names import PAGE

# Ignored options: they change neither outputs nor features, regardless of their value.
PASSED_OVER = {
    *("block_size", "swap_space", "num_gpu_blocks_override", "max_seq_len_to_capture"),
    *("enforce_eager", "compilation_config", "cudagraph_capture_sizes", "optimization_level"),
    *("disable_log_stats", "disable_custom_all_reduce", "disable_async_output_proc"),
    *("disable_cascade_attn", "enable_chunked_prefill", "max_num_partial_prefills"),
    *("distributed_executor_backend", "max_parallel_loading_workers", "attention_backend"),
    *("limit_mm_per_prompt", "enable_sleep_mode", "ray_workers_use_nsight", "profiler_config"),
    *("max_lora_rank", "max_loras", "observability_config", "use_tqdm_on_load"),
    *("enable_log_requests", "disable_log_requests", "max_log_len", "served_model_name"),
    *("attention_config", "kernel_config", "mamba_config", "ir_op_priority", "performance_mode"),
    *("moe_backend", "all2all_backend", "mamba_backend", "gdn_prefill_backend"),
    *("enable_flashinfer_autotune", "max_cudagraph_capture_size", "cudagraph_metrics"),
    *("max_long_partial_prefills", "long_prefill_token_threshold", "scheduler_reserve_full_isl"),
    *("prefix_caching_hash_algo", "disable_hybrid_kv_cache_manager", "mamba_block_size"),
    *("mamba_cache_mode", "kv_cache_metrics", "kv_cache_metrics_sample", "collect_detailed_traces"),
    *("otlp_traces_endpoint", "show_hidden_metrics_for_version", "aggregate_engine_logging"),
    *("enable_mfu_metrics", "enable_layerwise_nvtx_tracing", "enable_logging_iteration_details"),
    *("language_model_only", "skip_mm_profiling", "mm_processor_cache_gb", "mm_encoder_tp_mode"),
    *("mm_processor_cache_type", "enable_mm_processor_stats", "disable_chunked_mm_input"),
    *("safetensors_load_strategy", "pt_load_map_location", "numa_bind", "renderer_num_workers"),
    *("shutdown_timeout", "fail_on_environ_validation", "enable_prompt_tokens_details"),
    "trust_remote_code",  # code of a checkpoint is never run
    *("h11_max_incomplete_event_size", "h11_max_header_count"),  # h11 reads no requests here
    *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"),  # see docs/tools.md
}
_DEVICES = "devices are divided by tensor_parallel_size, data_parallel_size and expert parallelism"
# Options that may change outputs. For each, the values that match the behaviour here and are
# accepted, and the reason to refuse every other value.
ONE_VALUE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "enable_lora": ((False, None), "there are no LoRA adapters; merge them into the checkpoint"),
    "load_format": (("auto", "safetensors"), "checkpoints are safetensors files"),
    "pipeline_parallel_size": ((1,), _DEVICES),
    "cpu_offload_gb": ((0, 0.0, None), "weights stay on the device; see sleep"),
    "tokenizer": ((None,), "the tokenizer is the checkpoint's"),
    "tokenizer_mode": (("auto", "hf"), "the tokenizer is the checkpoint's tokenizer.json"),
    "tokenizer_revision": ((None,), "the tokenizer is the checkpoint's"),
    "skip_tokenizer_init": ((False, None), "SamplingParams(detokenize=False) leaves out texts"),
    "revision": ((None,), "download the revision, and give its folder"),
    "code_revision": ((None,), "code of a checkpoint is never run"),
    "download_dir": ((None,), "the environment variable HF_HOME says where downloads go"),
    "hf_token": ((None,), "the environment variable HF_TOKEN has the token"),
    "hf_config_path": ((None,), "the config is the checkpoint's"),
    "hf_overrides": ((None, {}), "the config is the checkpoint's; edit its config.json"),
    "generation_config": (
        (None, "auto"),
        "the checkpoint's is used where sampling_params are left out; pass SamplingParams()",
    ),
    "override_generation_config": ((None, {}), "pass SamplingParams with these values"),
    "chat_template": ((None,), "pass it to chat"),
    "mm_processor_kwargs": ((None, {}), "models here read only text"),
    "runner": (("auto", "generate"), "models here generate, and do nothing else"),
    "task": (("auto", "generate"), "models here generate, and do nothing else"),
    "convert": (("auto", "none"), "models here generate, and do nothing else"),
    "logits_processors": ((None, []), "pass them in SamplingParams, as JAX functions"),
    "kv_transfer_config": ((None,), "caches are not sent to other engines"),
    "kv_events_config": ((None,), "caches are not sent to other engines"),
    "kv_offloading_size": ((None,), "caches stay on the device; see sleep"),
    "kv_cache_memory_bytes": ((None,), "num_pages says how large the cache is"),
    "prefill_context_parallel_size": ((1,), _DEVICES),
    "decode_context_parallel_size": ((1,), _DEVICES),
    "enable_eplb": ((False,), _DEVICES),
    "enable_dbo": ((False,), _DEVICES),
    "disable_sliding_window": ((False,), "the model's own windows are used"),
    "calculate_kv_scales": ((False,), "scales are the checkpoint's, or those of each token"),
    "mamba_cache_dtype": (("auto",), "states are float32"),
    "mamba_ssm_cache_dtype": (("auto", "float32"), "states are float32"),
    "enable_prompt_embeds": ((False,), "prompts are texts or token ids"),
    "config_format": (("auto", "hf"), "the config is the checkpoint's config.json"),
    "model_impl": (("auto",), "the models of this package are used"),
    "model_weights": (("", None), "weights are the checkpoint's"),
    "model_loader_extra_config": ((None, {}), "checkpoints are safetensors files"),
    "structured_outputs_config": ((None, {}), "StructuredOutputs sets everything per request"),
    "guided_decoding_backend": ((None, "auto", "guidance"), "llguidance follows grammars"),
    "reasoning_config": ((None, {}), "max_tokens limits all tokens"),
    "pooler_config": ((None,), "models here generate, and do nothing else"),
    "stream_interval": ((1,), "streams yield added tokens at every step"),
    "scheduler_cls": ((None,), "scheduling_policy chooses the order"),
    "worker_cls": (("auto",), "an engine runs in this process"),
    "worker_extension_cls": (("", None), "an engine runs in this process"),
    "weight_transfer_config": ((None,), "weights are updated by specjax.rl"),
    "api_server_count": ((1, None), "one process answers clients"),
    "response_role": (("assistant",), "the assistant answers"),
    "additional_config": ((None, {}), "there are no plugins to read it"),
}


def take_vllm_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` without vLLM's options. Warn once about all options that are ignored.

    Raises:
        ValueError: an option of vLLM would change outputs; the message says why it is refused.
    """
    for name, value in given.items():
        values, reason = ONE_VALUE.get(name, ((value,), ""))
        # 0 == False, so compare types as well.
        if not any(value == one and type(value) is type(one) for one in values):
            shown = " or ".join(map(repr, values))
            raise ValueError(
                f"{name}={value!r} is not supported: {reason}; leave it out (it is {shown}); see "
                f"{PAGE}"
            )
    passed = [name for name in given if name in PASSED_OVER or name in ONE_VALUE]
    if passed:
        warn(f"options of vLLM without effect here: {', '.join(passed)}")
    return {name: value for name, value in given.items() if name not in passed}
