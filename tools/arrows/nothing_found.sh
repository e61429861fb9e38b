#!/usr/bin/env bash
# Fails when the file of a query's result, its one argument, is not empty.
[[ -f $1 ]] || { echo "no such file: $1"; exit 1; }
if [[ -s $1 ]]; then
  echo "These targets are linked although the arrows forbid it:"
  cat "$1"
  exit 1
fi
