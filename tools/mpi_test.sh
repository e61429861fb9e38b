#!/usr/bin/env bash
# Runs a test program under mpirun: mpi_test.sh RANKS PROGRAM [ARGS...]
# Works inside Bazel's test sandbox, as root or not, on one host without a
# network. Exits with mpirun's status, which is non-zero when any rank's is.
set -u

ranks=$1
program=$2
shift 2

# Open MPI puts Unix sockets into its session folder; their paths are limited
# to 108 bytes, and Bazel's own temporary folder is longer than that.
session=$(mktemp -d /tmp/ek_mpi.XXXXXX) || exit 1
trap 'rm -rf "$session"' EXIT

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_orte_tmpdir_base=$session
export OMPI_MCA_plm=isolated            # one host: no remote shell needed
export OMPI_MCA_btl=self,vader          # shared memory only
export OMPI_MCA_btl_vader_single_copy_mechanism=none  # no ptrace rights needed
export OMPI_MCA_btl_vader_backing_directory=$session
export OMPI_MCA_pml=ob1
export OMPI_MCA_osc=^ucx
export OMPI_MCA_oob_tcp_if_include=lo
export OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_mpi_yield_when_idle=1
export OMP_NUM_THREADS=1

# Ranks would overwrite each other's report; Bazel writes one from the log.
unset XML_OUTPUT_FILE GTEST_OUTPUT TEST_PREMATURE_EXIT_FILE
# System libraries under Open MPI keep memory until exit.
export ASAN_OPTIONS="${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0"

mpirun --oversubscribe --tag-output -n "$ranks" "$program" "$@"
