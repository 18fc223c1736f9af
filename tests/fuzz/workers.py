"""Processes that examine programs side by side: one that dies, or has not been heard of for long, is replaced."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.fuzz.examine import Outcome, examine

HANG = 60.0  # seconds for one program
START = 180.0  # seconds until the first


@dataclass(frozen=True)
class Task:
    """Work of all workers: programs of a seed, of a category or of any."""

    seed: int
    category: str
    on_gpu: bool
    deadline: float  # by `time.time`


@dataclass
class Worker:
    """A process that examines every `stride`-th program."""

    process: BaseProcess
    answers: Connection
    number: int  # of its program
    heard: float
    is_started: bool = False
    is_silent: bool = False  # it has closed its end


def _work(task: Task, first: int, stride: int, answers: Connection) -> None:
    """Examine programs until the deadline or until one stops the GPU; tell which one comes, and what came of it."""
    number = first
    while time.time() < task.deadline:
        answers.send(number)
        outcome = examine(task.seed, number, task.category, task.on_gpu)
        answers.send(outcome)
        if outcome.stops_gpu:
            answers.close()
            os._exit(0)  # without the exit handlers of libraries, whose calls of the GPU would fail
        number += stride


def outcomes(task: Task, jobs: int) -> Iterator[Outcome | str]:
    """Yield what comes of programs, in any order; a text for a worker that died or hung."""
    context = multiprocessing.get_context("spawn")

    def start(first: int) -> Worker:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(task, first, jobs, theirs), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, first, time.time())

    workers = {i: start(i) for i in range(jobs)}
    try:
        while workers:
            wait([worker.answers for worker in workers.values()], timeout=1.0)
            for i, worker in list(workers.items()):
                yield from _read(worker)
                problem = _problem(worker)
                if problem is None:
                    continue
                worker.process.kill()
                worker.process.join()
                if problem:
                    yield f"program {worker.number} {problem}"
                if time.time() < task.deadline and worker.is_started:
                    workers[i] = start(worker.number + jobs)
                else:
                    del workers[i]
    finally:
        for worker in workers.values():
            worker.process.kill()


def _read(worker: Worker) -> Iterator[Outcome]:
    """Take what a worker has said."""
    try:
        while worker.answers.poll():
            answer: Any = worker.answers.recv()
            worker.heard = time.time()
            if isinstance(answer, Outcome):
                worker.is_started = True
                yield answer
            else:
                worker.number = answer
    except EOFError:
        worker.is_silent = True


def _problem(worker: Worker) -> str | None:
    """Say what is wrong with a worker, "" if it has ended well, None if it works."""
    if worker.is_silent:
        worker.process.join(START)
        code = worker.process.exitcode
        return "" if code == 0 else f"ended its process with {code}"
    limit = HANG if worker.is_started else START
    return f"gave no sign for {limit:.0f} s" if time.time() - worker.heard > limit else None
