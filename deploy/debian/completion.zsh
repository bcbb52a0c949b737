#compdef kvpoold kvpoolctl kvpool-replay kvpool-sim kvpool-lab
# Flags and commands, as --help of the program itself lists them. Behind `=` is a value, which may be a path.
compset -P '--*=' && _files && return
local -a known
known=($($words[1] --help 2>/dev/null | sed -n -e 's/^  \(--[a-z-]*=\{0,1\}\).*/\1/p' -e '/^Commands:$/,/^$/s/^  \([a-z]*\) .*/\1/p' \
  -e 's/^kvpool[a-z-]* \([a-z][a-z|]*\) .*/\1/p' | tr '|' '\n'))
compadd -S '' -- ${(M)known:#*=}
compadd -- ${known:#*=}
