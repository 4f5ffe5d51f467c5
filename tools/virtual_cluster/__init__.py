"""A cluster with real Slurm on one machine: every node is a set of Linux namespaces with its own slurmd.

    python -m tools.virtual_cluster up WORK --nodes 2          # node0 10.77.0.10, node1 10.77.0.11, ctl 10.77.0.1
    python -m tools.virtual_cluster run WORK ctl -- sinfo      # any command on any node, in the current directory
    python -m tools.virtual_cluster run WORK ctl -- sbatch --nodes=2 --ntasks-per-node=1 examples/launch/slurm.sh ...
    python -m tools.virtual_cluster fault WORK power-off node1
    python -m tools.virtual_cluster down WORK                  # ends everything that runs in it; logs stay in WORK
    python -m tools.virtual_cluster check --install            # says why this machine cannot; installs what is missing

A node has its own network, host name, processes, mounts, shared memory and cgroup (CPU time and memory); `ctl` has the
switch, munged and slurmctld. The file system is shared, as a cluster's is. Needs root and Debian's packages slurm-wlm,
munge and iproute2; none of their services has to run on the machine itself, whose network is left alone.
"""

from tools.virtual_cluster.cluster import CGROUP_V1, CONTROLLER, ClusterSettings, JobState, VirtualCluster, virtual_cluster
from tools.virtual_cluster.machine import unavailable

__all__ = ["CGROUP_V1", "CONTROLLER", "ClusterSettings", "JobState", "VirtualCluster", "unavailable", "virtual_cluster"]
