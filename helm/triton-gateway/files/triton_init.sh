# Process 1 of Triton's container: docs/decisions/0023-pods.md
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

# `/dev/shm` and `/tmp` are volumes of the pod. Every process of the previous container has ended, but a Triton that was killed
# left the shared memory of its models there, and the models that it had copied from an object store. Files in `/dev/shm`
# with the gateway's prefix belong to a gateway, which may run. Folders there are not Triton's.
for left in /dev/shm/* /tmp/folder?????? /tmp/python_env_??????; do
    case $left in
        /dev/shm/triton_gateway_lane_*) ;;
        /dev/shm/*) [ -d "$left" ] || rm -f "$left" ;;
        *) rm -rf "$left" ;;
    esac
done

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
