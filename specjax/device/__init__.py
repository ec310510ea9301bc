"""The device side of an engine: pure array functions, compiled by JAX.

The host plans each step and sends its inputs as packed integer arrays. No value returns to Python
within a step: until the step's results are read, only the device knows the number of accepted
drafts. Shapes use these letters. `f32`, `i32`, `u32` and `bool` are dtypes; an array without a
dtype has the model's. has the model's dtype.

    B   requests in a step, including padding
    S   slots: maximum number of resident requests
    T   rows of a request in a step: tokens of a chunk; or last token, drafts and padding
    N   total rows, B T; the rows of a request are adjacent
    K   drafts per request
    R   results of a request: K + 1, or 1 at the end of a chunk
    L   tokens of a sequence, max_model_len
    P   entries of a request's page table
    V   tokens of the vocabulary; V_d of a draft vocabulary
    D   width of the model
    F   inner width of a feed-forward layer; E is the number of experts
    H   query heads; H_kv of keys and values, H_v of recurrent states
    D_h width of a head; D_k, D_v of a recurrent state's keys and values
    C   channels of a convolution over W tokens
"""
