"""Generates outputs that match a JSON schema, a regular expression or a list of choices.

    pip install "specjax[structured]" && python examples/structured_output.py

The engine drafts with EAGLE-3. The demo model does not know prices, but its outputs have the
requested form.
"""

import json

from specjax import LLM, SamplingParams, StructuredOutputs

PROMPT = "Question: A shop sells 5 apples for $3. Describe one apple.\nAnswer:"
ITEM = {
    "type": "object",
    "properties": {
        "name": {"enum": ["apple", "pear"]},
        "price": {"type": "number", "minimum": 0, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "ripe"]}, "maxItems": 2},
    },
    "required": ["name", "price", "tags"],
    "additionalProperties": False,
}
WANTED = {
    "JSON": StructuredOutputs(json=ITEM),
    "regex": StructuredOutputs(regex=r" \$[0-9]\.[0-9]{2} each"),
    "choice": StructuredOutputs(choice=["cheap", "fair", "expensive"]),
}
EAGLE3 = {"method": "eagle3", "model": "demo-llama-eagle3", "num_speculative_tokens": 3}

with LLM("demo-llama", speculative_config=EAGLE3, max_model_len=512, verbose=False) as llm:
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=96, structured_outputs=wanted)
        for i in range(2)
        for wanted in WANTED.values()
    ]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for i, (name, output) in enumerate(zip([*WANTED] * 2, outputs, strict=True)):
        text = output.outputs[0].text or ""
        print(f"seed {i // len(WANTED)}  {name:<7} {text!r}")
        if name == "JSON":
            print(f"        parsed  {json.loads(text)}")
    print(f"acceptance length {llm.metrics().mean_acceptance_length:.2f}")
