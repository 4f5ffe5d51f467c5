"""A game over turns: find a number between 1 and 31 in ten guesses, each answered by "higher" or "lower"."""

from __future__ import annotations

from megatron_dapo.environments import Environment, Step

HIGHEST, MOST_GUESSES = 31, 10


class Guess(Environment):
    """A guess that the answers so far have ruled out costs one; the right one is worth one."""

    def reset(self, task, seed):
        self.number, self.low, self.high, self.num_guesses = int(task["answer"]), 1, HIGHEST, 0
        return task.messages

    def step(self, turn):
        text = turn.text.strip()
        guess = int(text) if text.isdecimal() else 0
        reward = 0.0 if self.low <= guess <= self.high else -1.0
        self.num_guesses += 1
        if guess == self.number or self.num_guesses == MOST_GUESSES:
            is_right = guess == self.number
            return Step(done=True, reward=float(is_right) or reward, correct=is_right, parts={"guesses": self.num_guesses})
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return Step("higher", reward=reward)
        self.high = min(self.high, guess - 1)
        return Step("lower", reward=reward)
