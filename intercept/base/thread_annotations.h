// Lock rules that clang checks (-Wthread-safety): which mutex guards a member, and which a function
// needs.
//
// The macros expand to nothing under other compilers. reft::Mutex (mutex.h) is the lock to name in
// them. A lambda is a function of its own: annotate it, as `[this]() REQUIRES(mutex_) { … }`.
//
// Threads, errors: none; everything here happens at compile time.
#pragma once

#if defined(__clang__)
#define REFT_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define REFT_THREAD_ANNOTATION(x)
#endif

// On a class: it is a lock; it holds a lock while it lives.
#define CAPABILITY(name) REFT_THREAD_ANNOTATION(capability(name))
#define SCOPED_CAPABILITY REFT_THREAD_ANNOTATION(scoped_lockable)

// On a member: readers and writers hold the lock; PT_: the lock guards what the pointer points to.
#define GUARDED_BY(lock) REFT_THREAD_ANNOTATION(guarded_by(lock))
#define PT_GUARDED_BY(lock) REFT_THREAD_ANNOTATION(pt_guarded_by(lock))

// On a function: the caller holds the lock; the caller must not hold it.
#define REQUIRES(...) REFT_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) REFT_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

// On a function: it takes the lock, gives it back, or takes it if it returns `result`.
#define ACQUIRE(...) REFT_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) REFT_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) REFT_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))

// On a function: clang cannot follow its locking. A comment beside it says why the locking is
// right.
#define NO_THREAD_SAFETY_ANALYSIS REFT_THREAD_ANNOTATION(no_thread_safety_analysis)
