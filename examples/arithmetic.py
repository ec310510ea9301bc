"""The task of `grpo_arithmetic.py`: questions for the sum of two numbers, and the reward.

The first number has two digits, and the second number is small. An answer adds the ones, then adds
the carry to the tens, then states the result:

    Question: What is 48 + 4?
    Answer: 8+4=12
    4+1=5
    #### 52

Only the number after the last "####" is judged, not the steps.
"""

import random
import re
from dataclasses import dataclass

MOST = 4  # the largest second number
NUM_QUESTIONS = 90 * MOST
MAX_TOKENS = 24  # per answer; a right answer has at most 21
FINAL = re.compile(r"#### (-?\d+)")


@dataclass(frozen=True)
class Question:
    """The question "What is a + b?"."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """The question in the demo model's prompt format."""
        return f"Question: What is {self.a} + {self.b}?\nAnswer:"

    def worked(self, slip: int = 0) -> str:
        """Return an answer with all steps. The sum of the ones digits is wrong by `slip`."""
        tens, ones = divmod(self.a, 10)
        found = ones + self.b + slip
        steps = f"{ones}+{self.b}={found}\n{tens}+{found // 10}={tens + found // 10}"
        return f" {steps}\n#### {10 * tens + found}"


def reward(question: Question, text: str) -> float:
    """Return 1 if the last result in `text` is right, else 0."""
    results = FINAL.findall(text)
    return float(bool(results) and int(results[-1]) == question.a + question.b)


def split_questions(seed: int, num_held_out: int) -> tuple[list[Question], list[Question]]:
    """Return all questions in random order, split into training and held-out questions."""
    questions = [Question(a, b) for a in range(10, 100) for b in range(1, MOST + 1)]
    random.Random(seed).shuffle(questions)
    return questions[num_held_out:], questions[:num_held_out]
