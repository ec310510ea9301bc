"""The task of `grpo_arithmetic.py`: sums of a two-digit number and a small one, and a judge.

An answer adds the ones, then the tens and the carry, then says the number:

    Question: What is 48 + 4?
    Answer: 8+4=12
    4+1=5
    #### 52

How an answer gets there is not judged, only the number after the last "####".
"""

import random
import re
from dataclasses import dataclass

MOST = 4  # of the second number
NUM_QUESTIONS = 90 * MOST
FINAL = re.compile(r"#### (-?\d+)")


@dataclass(frozen=True)
class Question:
    """What is a + b?"""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """As the demo model was trained to be asked."""
        return f"Question: What is {self.a} + {self.b}?\nAnswer:"

    def worked(self, slip: int = 0) -> str:
        """An answer that is wrong by `slip` in the ones, and right in what it makes of that."""
        tens, ones = divmod(self.a, 10)
        found = ones + self.b + slip
        steps = f"{ones}+{self.b}={found}\n{tens}+{found // 10}={tens + found // 10}"
        return f" {steps}\n#### {10 * tens + found}"


def reward(question: Question, text: str) -> float:
    """1 if the last number that `text` gives as its result is right, else 0."""
    results = FINAL.findall(text)
    return float(bool(results) and int(results[-1]) == question.a + question.b)


def split_questions(seed: int, num_held_out: int) -> tuple[list[Question], list[Question]]:
    """All questions in random order: those to train on, and those held out."""
    questions = [Question(a, b) for a in range(10, 100) for b in range(1, MOST + 1)]
    random.Random(seed).shuffle(questions)
    return questions[num_held_out:], questions[:num_held_out]
