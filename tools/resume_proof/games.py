"""Environments of `tools/prove_resume.py`: what they say depends on the turn, on earlier ones and on the seed."""

from megatron_dapo.environments import Environment, Step, ToolEnvironment, tool


class Letters(Environment):
    """One to five turns, so that many are unfinished at a step's end; an even number of letters in all is right."""

    def reset(self, task, seed):
        self.num_letters, self.num_left = 0, task.random.randint(1, 5)
        return task["messages"]

    def step(self, turn):
        self.num_letters += len(turn.text)
        self.num_left -= 1
        said = f"{len(turn.text)} letters, {self.task.random.randint(1, 9)} points."
        if not self.num_left:
            return Step(done=True, reward=float(self.num_letters % 2 == 0), parts={"letters": self.num_letters})
        return Step(said, reward=0.01 * len(turn.text))


class Answers(ToolEnvironment):
    """The base model's last line, "Answer: number", is a call; an even sum of what it wrote is right."""

    result_role = "user"
    total = 0

    @tool
    def Answer(self, number: int) -> str:
        """Note an answer."""
        self.total += number
        return f"{self.total} noted, {self.task.random.randint(1, 9)} points. Once more."

    def finish(self, turn):
        return (self.total + len(turn.text)) % 2 == 0
