# A zsh of its own, on a terminal, in which completions of kvpool's programs are asked for by the tab key.
# Usage: zsh -f completions_test.zsh [FOLDER], where FOLDER has _kvpool unless zsh's own folders do.
zmodload zsh/zpty zsh/zselect
folder=$(mktemp -d)
trap 'rm -rf $folder' EXIT
typed=$folder/typed
touch $folder/certificate
zpty shell zsh -f -i
zpty -w shell "cd $folder; fpath=($1 \$fpath); autoload -U compinit && compinit -u -d $folder/dump
  show() { print -r -- \"\$BUFFER\" >$typed; BUFFER= }; zle -N show; bindkey '^G' show"
# completed WORDS EXPECTED: what the line is once the tab key was pressed behind WORDS.
completed() {
  : >$typed
  zpty -n -w shell "$1"$'\t\a'
  for i in {1..100}; do [[ -s $typed ]] && break; zselect -t 10; done
  [[ "$(<$typed)" = "$2" ]] || { print -r -- "'$1' became '$(<$typed)', not '$2'" >&2; exit 1 }
}
completed 'kvpoolctl ses' 'kvpoolctl sessions '
completed 'kvpoolctl --dead' 'kvpoolctl --deadline='
completed 'kvpoolctl --js' 'kvpoolctl --json '
completed 'kvpoolctl --tls-ca=cer' 'kvpoolctl --tls-ca=certificate '
completed 'kvpool-sim adv' 'kvpool-sim advise '
