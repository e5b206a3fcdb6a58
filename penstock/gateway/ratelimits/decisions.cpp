// Begins and ends requests in the table of limits that the gateway processes of a server share. `meters.py` and
// `local.py` define what is decided here; `decisions.py` calls this. The layouts of the structs are there as well.

#include <sys/file.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#ifndef PENSTOCK_LIMITS_INTERFACE
#define PENSTOCK_LIMITS_INTERFACE 0
#endif

namespace {

constexpr int NUM_KINDS = 3, REQUESTS = 0;
constexpr int64_t KEY_CELLS = 2;
constexpr int64_t BUCKET_CELLS = 3;  // level, time of the last refill, limit
constexpr int64_t UNLOCKED = KEY_CELLS + NUM_KINDS * BUCKET_CELLS;
constexpr int64_t SLOT_CELLS = UNLOCKED + 1;
constexpr double SECONDS_PER_LIMIT = 60.0;
constexpr double TOLERANCE = 1e-6;

constexpr int REFUSED = 0, DONE = 1, ASK_PYTHON = -1;

struct Table {
    double *cells;
    int64_t num_slots, first_column, num_processes, own_process, file;

    // What a process runs, and behind it the money that is reserved, are columns of their own.
    double *column(int64_t process) const { return cells + first_column + 2 * num_slots * process; }
};

struct Subject {
    int64_t slot;
    uint64_t key[KEY_CELLS];
    double limits[NUM_KINDS];
    double max_running;
};

struct Left {
    double limit, rest, reset_s;
};

struct Caller {
    double now;
    double places;   // 1 to begin a request, -1 to end one
    double amounts[NUM_KINDS];  // requests and tokens to take; below 0 to give back
    double must_fit;  // whether limits may refuse
    Left left[NUM_KINDS];
    const Table *table;
    int64_t num_subjects;
    Subject subjects[];
};

class Lock {
public:
    explicit Lock(int64_t file) : file_(static_cast<int>(file)) {
        is_held_ = file_ < 0 || flock(file_, LOCK_EX | LOCK_NB) == 0;
    }
    ~Lock() {
        if (is_held_ && file_ >= 0) flock(file_, LOCK_UN);
    }
    Lock(const Lock &) = delete;
    Lock &operator=(const Lock &) = delete;
    bool is_held() const { return is_held_; }

private:
    int file_;
    bool is_held_;
};

double *slot_of(const Table &table, const Subject &subject) { return table.cells + subject.slot * SLOT_CELLS; }

double *bucket_of(const Table &table, const Subject &subject, int kind) {
    return slot_of(table, subject) + KEY_CELLS + kind * BUCKET_CELLS;
}

// Says whether a subject still has its slot, and the same limits there.
bool is_known(const Table &table, const Subject &subject) {
    if (subject.slot < 0 || subject.slot >= table.num_slots) return false;
    const auto *key = reinterpret_cast<const uint64_t *>(slot_of(table, subject));
    if (key[0] != subject.key[0] || key[1] != subject.key[1]) return false;
    for (int kind = 0; kind < NUM_KINDS; ++kind)
        if (subject.limits[kind] != 0 && bucket_of(table, subject, kind)[2] != subject.limits[kind]) return false;
    return true;
}

double refilled(const double *bucket, double now) {
    const double level = bucket[0], elapsed_s = now - bucket[1], limit = bucket[2];
    return elapsed_s > 0.0 ? std::min(limit, level + elapsed_s * (limit / SECONDS_PER_LIMIT)) : level;
}

bool has_place(const Table &table, const Subject &subject) {
    if (subject.max_running < 0) return true;
    double num_running = 0.0;
    for (int64_t process = 0; process < table.num_processes; ++process)
        num_running += table.column(process)[subject.slot];
    return num_running < subject.max_running;
}

bool fits(const Caller &caller, const Subject &subject) {
    if (caller.places > 0 && !has_place(*caller.table, subject)) return false;
    for (int kind = 0; kind < NUM_KINDS; ++kind) {
        if (subject.limits[kind] == 0 || (kind == REQUESTS && caller.amounts[kind] == 0)) continue;
        // A caller in debt for tokens must wait, even where it asks for none.
        if (refilled(bucket_of(*caller.table, subject, kind), caller.now) + TOLERANCE < caller.amounts[kind])
            return false;
    }
    return true;
}

// Takes what the caller asks for, and notes in `caller.left` what the tightest limit of each kind still has.
void take(Caller &caller, const Subject &subject, double (&lowest)[NUM_KINDS]) {
    const Table &table = *caller.table;
    // Processes that could not wait for the lock count what they stored without it. What they stored since this
    // process looked stays: only this one decision is not in the levels then.
    const volatile double *num_unlocked = slot_of(table, subject) + UNLOCKED;
    const double before = *num_unlocked;
    for (int kind = 0; kind < NUM_KINDS; ++kind) {
        if (subject.limits[kind] == 0) continue;
        double *bucket = bucket_of(table, subject, kind);
        const double limit = bucket[2];
        const double level = std::min(limit, refilled(bucket, caller.now) - caller.amounts[kind]);
        if (*num_unlocked == before) {
            bucket[0] = level;
            bucket[1] = std::max(bucket[1], caller.now);
        }
        if (level < lowest[kind]) {
            lowest[kind] = level;
            const double reset_s = (limit - level) / (limit / SECONDS_PER_LIMIT);
            caller.left[kind] = {limit, std::max(0.0, level + TOLERANCE), reset_s};
        }
    }
    double *num_running = table.column(table.own_process) + subject.slot;
    *num_running = std::max(0.0, *num_running + caller.places);
    if (*num_running == 0.0) num_running[table.num_slots] = 0.0;  // nothing runs that reserves money
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int penstock_limits_interface() { return PENSTOCK_LIMITS_INTERFACE; }

// Takes from all subjects of a caller or from none.
__attribute__((visibility("default"))) int penstock_limits_decide(Caller *caller) {
    const Table &table = *caller->table;
    const Lock lock(table.file);
    if (!lock.is_held()) return ASK_PYTHON;
    const Subject *begin = caller->subjects, *end = begin + caller->num_subjects;
    if (!std::all_of(begin, end, [&](const Subject &subject) { return is_known(table, subject); })) return ASK_PYTHON;
    if (caller->must_fit != 0 &&
        !std::all_of(begin, end, [&](const Subject &subject) { return fits(*caller, subject); }))
        return REFUSED;
    constexpr double NONE = std::numeric_limits<double>::infinity();
    double lowest[NUM_KINDS] = {NONE, NONE, NONE};
    std::fill_n(caller->left, NUM_KINDS, Left{0.0, 0.0, 0.0});
    for (const Subject *subject = begin; subject != end; ++subject) take(*caller, *subject, lowest);
    return DONE;
}

}  // extern "C"
