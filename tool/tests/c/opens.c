/* Opens a node that is not there, as often as the first argument says. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **arguments) {
    if (count < 2) return 2;
    for (long left = atol(arguments[1]); left > 0; left--) {
        if (open("/dev/davinci-that-is-not-there", O_RDWR | O_CLOEXEC) >= 0) return 1;
    }
    return 0;
}
