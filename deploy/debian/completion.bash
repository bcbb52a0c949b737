# Flags and commands, as --help of the program itself lists them.
_kvpool() {
  local known
  known=$("$1" --help 2>/dev/null | sed -n -e 's/^  \(--[a-z-]*=\{0,1\}\).*/\1/p' -e '/^Commands:$/,/^$/s/^  \([a-z]*\) .*/\1/p' \
    -e 's/^kvpool[a-z-]* \([a-z][a-z|]*\) .*/\1/p' | tr '|' '\n')
  # shellcheck disable=SC2207  # one word a line
  COMPREPLY=($(compgen -W "$known" -- "$2"))
  if [ ${#COMPREPLY[@]} = 1 ] && [[ ${COMPREPLY[0]} = *= ]]; then compopt -o nospace 2>/dev/null || true; fi
}
complete -o default -F _kvpool kvpoold kvpoolctl kvpool-replay kvpool-sim kvpool-lab
