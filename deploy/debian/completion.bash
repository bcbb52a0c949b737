# Flags and commands, as --help of the program itself lists them.
_kvpool() {
  local words
  words=$("$1" --help 2>/dev/null | sed -n -e 's/^  \(--[a-z-]*=\{0,1\}\).*/\1/p' -e '/^Commands:$/,/^$/s/^  \([a-z]*\) .*/\1/p')
  # shellcheck disable=SC2207  # one word a line
  COMPREPLY=($(compgen -W "$words" -- "$2"))
  if [ ${#COMPREPLY[@]} = 1 ] && [[ ${COMPREPLY[0]} = *= ]]; then compopt -o nospace 2>/dev/null || true; fi
}
complete -o default -F _kvpool kvpoold kvpoolctl kvpool-replay kvpool-sim kvpool-lab
