"""The device side of an engine: pure array functions, compiled by JAX.

The host plans each step and sends its inputs as packed integer arrays. Until the step's results are
read, only the device knows the number of accepted drafts. Within a step, the host reads nothing,
except drafts for which it has to make grammar masks.

A step runs chunks of prompts (prefill), a round of speculative decoding, or both. A round drafts
tokens and verifies them. A row is one token position of one request. A request is resident while it
owns a slot, which is its index in arrays of the engine's state.

Shapes use these letters. `f32`, `i32`, `u32` and `bool` are dtypes. An array without a dtype has
the model's dtype.

    B   number of requests in a step, including padding
    S   number of slots, which is the maximum number of resident requests
    T   rows per request: the tokens of a chunk; or in a round, the last token, drafts and padding
    N   total number of rows, B T; the rows of a request are adjacent
    K   number of drafts per request
    R   results per request: K + 1 in a round, 1 at the end of a chunk
    L   maximum number of tokens of a sequence, `max_model_len`
    P   number of entries in a request's page table
    V   number of tokens in the vocabulary; V_d in a reduced draft vocabulary
    D   width of the model
    E   number of experts
    F   inner width of a feed-forward layer
    H   number of query heads; H_kv of key and value heads, H_v of heads in a recurrent state
    D_h width of a head; D_k and D_v are the widths of a recurrent state's keys and values
    C   number of channels of a convolution over W tokens
"""
