// Ends or fails file operations of a process that this library is loaded into (LD_PRELOAD).
//
// What changes files is counted, where it concerns files below the folder FAULTS_FOLDER. At operation number FAULTS_AT
// FAULTS_ACTION is done:
//   kill    the process is killed before the operation
//   half    of what is written, half is, and the process is killed
//   NUMBER  the operation, and all that follow, fail with this error number: those that need room on the disk or a
//           descriptor; files can still be renamed and removed
// FAULTS_LOG names a file that gets a line per operation: its number, its name, the paths.
// System calls are made directly, so that nothing in here comes through here again.

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <signal.h>
#include <string>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

enum class Fault { none, half, error };

int counted = 0;

std::string path_of(int descriptor) {
    char link[64], path[PATH_MAX];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path);
    return length > 0 ? std::string(path, static_cast<size_t>(length)) : std::string();
}

std::string absolute(int folder, const char* path) {
    if (path == nullptr || path[0] == '/') return path == nullptr ? "" : path;
    if (folder == AT_FDCWD) {
        char here[PATH_MAX];
        return syscall(SYS_getcwd, here, sizeof here) > 0 ? std::string(here) + "/" + path : path;
    }
    return path_of(folder) + "/" + path;
}

void log_line(const char* name, const std::string& path, const std::string& other) {
    const char* target = std::getenv("FAULTS_LOG");
    if (target == nullptr) return;
    const long file = syscall(SYS_openat, AT_FDCWD, target, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) return;
    const std::string line = std::to_string(counted) + "\t" + name + "\t" + path + "\t" + other + "\n";
    syscall(SYS_write, file, line.data(), line.size());
    syscall(SYS_close, file);
}

// Called before an operation: counts it, and says what is to become of it.
Fault before(const char* name, const std::string& path, const std::string& other = "") {
    const char* folder = std::getenv("FAULTS_FOLDER");
    if (folder == nullptr) return Fault::none;
    const std::string below = std::string(folder) + "/";
    if (path.rfind(below, 0) != 0 && path != folder && other.rfind(below, 0) != 0) return Fault::none;
    ++counted;
    log_line(name, path, other);
    const char *at = std::getenv("FAULTS_AT"), *action = std::getenv("FAULTS_ACTION");
    if (at == nullptr || action == nullptr || counted < std::atoi(at)) return Fault::none;
    if (std::strcmp(action, "half") == 0) return Fault::half;
    if (std::strcmp(action, "kill") == 0) syscall(SYS_kill, getpid(), SIGKILL);
    errno = std::atoi(action);
    return Fault::error;
}

[[noreturn]] void end() {
    syscall(SYS_kill, getpid(), SIGKILL);
    std::abort();
}

bool changes(int flags) { return (flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR)) != 0; }

int open_at(int folder, const char* path, int flags, mode_t mode) {
    if (changes(flags)) {
        const Fault fault = before("open", absolute(folder, path));
        if (fault == Fault::error) return -1;
        if (fault == Fault::half) end();
    }
    return static_cast<int>(syscall(SYS_openat, folder, path, flags, mode));
}

ssize_t write_at(int descriptor, const void* data, size_t size, off_t offset, bool positioned) {
    const Fault fault = before("write", path_of(descriptor));
    if (fault == Fault::error) return -1;
    const size_t amount = fault == Fault::half ? size / 2 : size;
    const long written = positioned ? syscall(SYS_pwrite64, descriptor, data, amount, offset)
                                    : syscall(SYS_write, descriptor, data, amount);
    if (fault == Fault::half) end();
    return written;
}

// For operations of which no half can be done.
bool refused(const char* name, const std::string& path) {
    const Fault fault = before(name, path);
    if (fault == Fault::half) end();
    return fault == Fault::error;
}

// For operations that need neither room nor a descriptor.
void look(const char* name, const std::string& path, const std::string& other = "") {
    if (before(name, path, other) == Fault::half) end();
}

mode_t mode_of(int flags, va_list arguments) {
    return (flags & (O_CREAT | O_TMPFILE)) != 0 ? static_cast<mode_t>(va_arg(arguments, int)) : 0;
}

}  // namespace

#define OPEN_WITH_MODE(call)                 \
    va_list arguments;                       \
    va_start(arguments, flags);              \
    const mode_t mode = mode_of(flags, arguments); \
    va_end(arguments);                       \
    return call

extern "C" {

int open(const char* path, int flags, ...) { OPEN_WITH_MODE(open_at(AT_FDCWD, path, flags, mode)); }
int open64(const char* path, int flags, ...) { OPEN_WITH_MODE(open_at(AT_FDCWD, path, flags | O_LARGEFILE, mode)); }
int openat(int folder, const char* path, int flags, ...) { OPEN_WITH_MODE(open_at(folder, path, flags, mode)); }
int openat64(int folder, const char* path, int flags, ...) {
    OPEN_WITH_MODE(open_at(folder, path, flags | O_LARGEFILE, mode));
}
int creat(const char* path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char* path, mode_t mode) { return creat(path, mode); }

ssize_t write(int descriptor, const void* data, size_t size) { return write_at(descriptor, data, size, 0, false); }
ssize_t pwrite(int descriptor, const void* data, size_t size, off_t offset) {
    return write_at(descriptor, data, size, offset, true);
}
ssize_t pwrite64(int descriptor, const void* data, size_t size, off64_t offset) {
    return write_at(descriptor, data, size, offset, true);
}
ssize_t writev(int descriptor, const iovec* parts, int count) {
    if (refused("write", path_of(descriptor))) return -1;
    return syscall(SYS_writev, descriptor, parts, count);
}
ssize_t sendfile64(int target, int source, off64_t* offset, size_t count) {
    if (refused("write", path_of(target))) return -1;
    return syscall(SYS_sendfile, target, source, offset, count);
}
ssize_t sendfile(int target, int source, off_t* offset, size_t count) { return sendfile64(target, source, offset, count); }
ssize_t copy_file_range(int source, off64_t* from, int target, off64_t* to, size_t count, unsigned flags) {
    if (refused("write", path_of(target))) return -1;
    return syscall(SYS_copy_file_range, source, from, target, to, count, flags);
}

int fsync(int descriptor) { return refused("fsync", path_of(descriptor)) ? -1 : static_cast<int>(syscall(SYS_fsync, descriptor)); }
int fdatasync(int descriptor) {
    return refused("fsync", path_of(descriptor)) ? -1 : static_cast<int>(syscall(SYS_fdatasync, descriptor));
}
int ftruncate(int descriptor, off_t size) {
    return refused("truncate", path_of(descriptor)) ? -1 : static_cast<int>(syscall(SYS_ftruncate, descriptor, size));
}
int ftruncate64(int descriptor, off64_t size) { return ftruncate(descriptor, size); }
int fallocate(int descriptor, int mode, off_t offset, off_t size) {
    return refused("truncate", path_of(descriptor)) ? -1 : static_cast<int>(syscall(SYS_fallocate, descriptor, mode, offset, size));
}
int posix_fallocate(int descriptor, off_t offset, off_t size) { return fallocate(descriptor, 0, offset, size) == 0 ? 0 : errno; }

int renameat2(int from, const char* old_path, int to, const char* new_path, unsigned flags) {
    look("rename", absolute(from, old_path), absolute(to, new_path));
    return static_cast<int>(syscall(SYS_renameat2, from, old_path, to, new_path, flags));
}
int renameat(int from, const char* old_path, int to, const char* new_path) {
    return renameat2(from, old_path, to, new_path, 0);
}
int rename(const char* old_path, const char* new_path) { return renameat2(AT_FDCWD, old_path, AT_FDCWD, new_path, 0); }

int unlinkat(int folder, const char* path, int flags) {
    look("unlink", absolute(folder, path));
    return static_cast<int>(syscall(SYS_unlinkat, folder, path, flags));
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int mkdirat(int folder, const char* path, mode_t mode) {
    return refused("mkdir", absolute(folder, path)) ? -1 : static_cast<int>(syscall(SYS_mkdirat, folder, path, mode));
}
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int linkat(int from, const char* old_path, int to, const char* new_path, int flags) {
    if (refused("link", absolute(to, new_path))) return -1;
    return static_cast<int>(syscall(SYS_linkat, from, old_path, to, new_path, flags));
}
int link(const char* old_path, const char* new_path) { return linkat(AT_FDCWD, old_path, AT_FDCWD, new_path, 0); }

}  // extern "C"
