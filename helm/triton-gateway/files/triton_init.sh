# Process 1 of Triton's container: docs/decisions/0042-process-1-of-tritons-container.md
# Arguments: the seconds between SIGTERM and SIGKILL, the image's entry point, and Triton's command line.
# Kubernetes changes a dollar sign before another one or before a parenthesis, so this script has neither.
limit_s=$1
entry=$2
shift 2
if [ -x "$entry" ]; then
    set -- "$entry" "$@"
fi

# Sends SIGTERM twice, because a process that was just forked can lose the first one. Triton ignores the second one.
end_triton() {
    kill -TERM "$triton"
    sleep 1
    kill -TERM "$triton"
    sleep "$limit_s"
    kill -KILL "$triton"
} 2>/dev/null

stop() {
    trap : TERM INT
    is_stopping=yes
    if [ -n "$triton" ]; then
        end_triton &
    fi
}

is_stopping=
triton=
trap stop TERM INT
"$@" &
triton=$!
if [ -n "$is_stopping" ]; then
    end_triton &
fi
# A signal interrupts `wait`. The last `wait` returns the exit status of Triton.
while
    wait "$triton"
    status=$?
    kill -0 "$triton" 2>/dev/null
do
    :
done
exit "$status"
