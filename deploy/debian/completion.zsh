#compdef kvpoold kvpoolctl kvpool-replay kvpool-sim kvpool-lab
# Flags, as --help of the program itself lists them.
_gnu_generic "$@"
