"""A conversation with the demo model. Each turn finds the earlier turns in the prefix cache.

    python examples/chat.py

On a terminal, you can then ask questions; an empty line ends the conversation. The demo model
writes in the style of grade-school word problems, but does not solve them.
"""

import sys

from specjax import LLM, SamplingParams

QUESTIONS = [
    "Tom has 3 boxes of 12 eggs. How many eggs does he have?",
    "He sells half of them for $2 each. How much money does he make?",
    "He spends $10 of it on bread. How much money is left?",
]
PARAMS = SamplingParams(temperature=0, max_tokens=96)
EAGLE3 = {"method": "eagle3", "model": "demo-llama-eagle3", "num_speculative_tokens": 3}

with LLM("demo-llama", speculative_config=EAGLE3, max_num_seqs=1, verbose=False) as llm:
    messages: list[dict[str, str]] = []

    def ask(question: str) -> None:
        """Add a question and the model's answer to the conversation, and print both."""
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, PARAMS, use_tqdm=False)
        answer = (output.outputs[0].text or "").strip()
        messages.append({"role": "assistant", "content": answer})
        found = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
        print(f"you    {question}\nmodel  {answer}\n       ({found})\n")

    for question in QUESTIONS:
        ask(question)
    while sys.stdin.isatty() and (question := input("you    ")):
        ask(question)
