#!/bin/bash
# A SLURM array of 4 supervisors: edit the paths, then `sbatch slurm_array.sh`.
#SBATCH --job-name=ablate
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=ablate-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180
#SBATCH --requeue

set -u
srun --nodes=1 --ntasks=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \
    ablate run /shared/grid.yaml \
    --experiments /shared/experiments --no-wait
code=$?
if [ "$code" -eq 130 ] || [ "$code" -eq 138 ]; then
    # Cut short, its state saved: the same task continues when its turn comes again.
    scontrol requeue Incomplete "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
