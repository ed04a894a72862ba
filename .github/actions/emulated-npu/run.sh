# Runs $COMMAND on emulated NPUs: once for each of $GENERATIONS and for each of $SEEDS seeds, with the
# options $OPTIONS of `ascend-vmm emulate`. $TOOL is the program, or `python3 -m ascend_vmm` of the
# wheel. What is wrong after a run becomes an annotation on GitHub, and the first line of the log
# elsewhere. Ends with 1 if any run failed.
set -u
tool=${TOOL:-${GITHUB_ACTION_PATH:-.github/actions/emulated-npu}/../../../target/release/ascend-vmm}
log=$(mktemp)
failed=0
for generation in ${GENERATIONS:-8.5.0 9.0.0 26.1}; do
    seed=0
    while [ "$seed" -lt "${SEEDS:-1}" ]; do
        # Both are words.
        # shellcheck disable=SC2086
        $tool emulate --driver "$generation" --seed "$seed" ${OPTIONS:-} -- sh -c "$COMMAND" 2>"$log"
        status=$?
        if [ "$status" -ne 0 ]; then
            failed=1
            # A comma would end the title of an annotation.
            title="driver $generation with seed $seed"
            if [ -n "${GITHUB_ACTIONS:-}" ]; then
                sed -n "s/^after the run: /::error title=$title::/p" "$log"
                echo "::error title=$title::the run ended with $status"
            else
                sed -n "s/^after the run: /error: $title: /p" "$log"
                echo "error: $title: the run ended with $status"
            fi
        fi
        cat "$log" >&2
        seed=$((seed + 1))
    done
done
rm -f "$log"
exit "$failed"
