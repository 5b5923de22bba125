"""Several runs at once, each a job on this machine or on a SLURM cluster, through submitit."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError, import_optional
from ptlf.core.settings import as_dict, parse
from ptlf.run.config import Config, from_dict
from ptlf.run.loop import Run
from ptlf.run.sweep import Planned, Tell

TIMEOUT = 24 * 60  # minutes; the cluster then stops the job and queues it again


class Job:
    """Train one run, or resume it. Called in another process, perhaps on another machine."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = as_dict(config), folder.absolute()

    def __call__(self) -> None:
        Run(from_dict(self.config), self.folder).train(resume=True)

    def checkpoint(self) -> Any:
        """What submitit queues when the job's time is over: the same job, which resumes the run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def train_as_jobs(
    runs: Sequence[Planned], logs: Path, cluster: str, jobs: int | None, job_options: Sequence[str], tell: Tell
) -> None:
    """Train the runs, at most `jobs` at a time, and wait for all of them.

    logs: folder for the jobs' output and errors.
    job_options: KEY=VALUE for submitit's `update_parameters`, such as slurm_partition=gpu.
    """
    executor = import_optional("submitit", "--cluster", "cluster").AutoExecutor(logs, cluster=cluster)
    if wrong := [option for option in job_options if "=" not in option]:
        raise UserError(f"--job-options takes KEY=VALUE, such as slurm_partition=gpu, not {wrong[0]!r}")
    parameters = {key: parse(value) for key, _, value in (option.partition("=") for option in job_options)}
    try:
        executor.update_parameters(**{"name": "ptlf", "timeout_min": TIMEOUT, **parameters})
    except (NameError, TypeError, ValueError, AssertionError) as wrong_option:
        raise UserError(f"--job-options: {' '.join(str(wrong_option).split())[:200]}") from None
    waiting, failed = list(runs), []
    running: dict[str, Any] = {}  # name: submitit's job
    while waiting or running:
        while waiting and (jobs is None or len(running) < jobs):
            run = waiting.pop(0)
            running[run.name] = executor.submit(Job(run.config, run.folder))
            tell(f"{run.name}: job {running[run.name].job_id} in {run.folder}")
        for name, job in [(name, job) for name, job in running.items() if job.done()]:
            del running[name]
            error = job.exception()
            tell(f"{name}: {'failed' if error else 'finished'}")
            if error:  # the job's traceback is its text
                lines = [line.strip() for line in str(error).splitlines() if "Error" in line or "Stopped" in line]
                failed.append(f"{name} failed ({(lines or ['?'])[-1][:200]}; see {job.paths.stderr})")
        time.sleep(0.2 if cluster == "local" else 10)  # seconds; polling a cluster's controller often is impolite
    if failed:
        raise UserError("; ".join(failed) + "; the same command continues with what is not finished")
