/* The commit exchange of snapshot/commit/{slot_book,commit_ledger}.h for the model checker spin: what every crash leaves behind.
 *
 * N ranks with two slots each, one agent, asynchronous first-in-first-out channels. A rank copies step s into a slot that
 * the rule allows to overwrite, seals it or drops it, and votes; the agent turns votes into an outcome. At any point the
 * agent may be killed and started again (it forgets everything, messages under way are lost, it reads the vaults, ranks
 * send unanswered votes again), or the whole job may be killed and starts again from the newest step that every vault has
 * sealed. A crash of one rank needs no move of its own: a dead rank is one that does not move, and the others going on
 * until they are ended too is among the interleavings.
 *
 * Each rank has a layout: what it believes to share with whom. The layout of one rank may change at any time, and all plan
 * anew together at a step's end. Votes carry a digest of the layout (one bit stands for the ring sum of agreement.h), and so
 * does a slot. A step can be restored only if it is sealed in all vaults, with one digest.
 *
 * Checked after every change of a vault, which is all that a crash leaves:
 *   - the newest step that can be restored is not older than the newest committed one;
 *   - nor than the newest step that all ranks have ever sealed with one digest;
 *   - nor, as long as nobody dropped, skipped or changed its layout, more than one step older than the newest step that all ranks finished.
 * No deadlock: nobody is stuck (invalid end states), and without a crash of the agent nobody ever waits in vain for an
 * outcome (`timeout`). With one, the rank skips a step, and its vote for that releases the others.
 *
 * -DNO_DIGESTS: a mutation. Sealed by all is committed, whatever their layouts: the assertions must fail.
 * -DNO_COMMIT_EXCHANGE: another. Slots are reused without waiting for the outcome: the assertions must fail.
 */
#ifndef N
#define N 2
#endif
#ifndef STEPS
#define STEPS 4
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef AGENT_CRASHES
#define AGENT_CRASHES 1
#endif
#ifndef DROPS
#define DROPS 1                  /* snapshots given up, or skipped because the wait seemed too long */
#endif

#ifndef CHANGES
#define CHANGES 0                /* layouts that one rank changes alone */
#endif

#define SLOTS 2
#define SLOT(r, i) ((r) * SLOTS + (i))
#define AT(r, s) ((r) * (STEPS + 1) + (s))
#define NONE 255

mtype = { FREE, WRITING, SEALED };

/* What a crash of the job leaves: the vaults. */
mtype state[N * SLOTS] = FREE;
byte held[N * SLOTS];
bit layout_of[N * SLOTS];        /* digest of the layout that the slot was sealed with */

/* The ranks. */
byte step[N];                    /* step that the rank works on; 0 = before the first */
byte current[N];                 /* slot that it writes, NONE = none */
bool busy[N];                    /* between the begin of a step and its vote */
byte committed[N];               /* newest committed step that the rank knows of */
bool aborted[N * SLOTS];
bool open_vote[N * (STEPS + 1)]; /* sent and not answered: sent again to a new agent */
bool yes[N * (STEPS + 1)];
bit voted[N * (STEPS + 1)];      /* digest that the vote carried */
bit layout[N];                   /* what the rank believes now */

/* Under way. */
chan votes[N] = [STEPS] of { byte, bool, bit };
chan outcomes[N] = [2 * STEPS] of { byte, bool };

/* The agent's ledger. */
bool got[N * (STEPS + 1)];
byte count[STEPS + 1];
bool no[STEPS + 1];
bool seen_0[STEPS + 1];          /* digests among the votes of a step */
bool seen_1[STEPS + 1];
byte outcome[STEPS + 1];         /* 0 open, 1 committed, 2 aborted */

/* Ghosts of the checker. */
byte newest_committed;           /* that any rank was told of */
byte completed;                  /* newest step that every rank has sealed, ever */
bool sealed_ever[N * (STEPS + 1)];
bool irregular;                  /* somebody dropped or skipped */
byte crashes, agent_crashes, drops, changes;
byte base;                       /* step that this life of the job was restored from */

/* Scratch of atomic blocks, always left at 0 so that it adds no states. */
byte t, u, v, w, x;


#define HAS(r, i, s, d) (state[SLOT(r, i)] == SEALED && held[SLOT(r, i)] == (s) && layout_of[SLOT(r, i)] == (d))

inline newest_common() {         /* → w: the newest step that can be restored */
  w = 0; t = 1;
  do
  :: t > STEPS -> break
  :: else ->
    x = 0;
    do
    :: x == 2 -> break
    :: else ->
      u = 0;
      do
      :: u == N -> break
      :: u < N && (HAS(u, 0, t, x) || HAS(u, 1, t, x)) -> u++
      :: else -> break
      od;
      if
      :: u == N -> w = t
      :: else
      fi;
      x++
    od;
    t++
  od;
  t = 0; u = 0; x = 0
}

/* The promise, checked wherever a crash of the job may come. */
inline check_safe() {
  newest_common();
  assert(w >= newest_committed);
  assert(w >= completed);
  t = step[0]; u = 1;
  do
  :: u == N -> break
  :: else -> t = (step[u] < t -> step[u] : t); u++
  od;
  assert(irregular || w + 1 >= t);
  t = 0; u = 0; w = 0
}

inline note_completed(s) {
  u = 0;
  do
  :: u == N -> break
  :: u < N && sealed_ever[AT(u, s)] && voted[AT(u, s)] == voted[AT(0, s)] -> u++
  :: else -> break
  od;
  if
  :: u == N -> completed = (s > completed -> s : completed)
  :: else
  fi;
  u = 0
}

inline decide(s) {               /* a decided outcome goes to every rank */
  if
  :: outcome[s] == 0 && (no[s] || count[s] == N) ->
#ifdef NO_DIGESTS
    outcome[s] = (no[s] -> 2 : 1);
#else
    outcome[s] = ((no[s] || (seen_0[s] && seen_1[s])) -> 2 : 1);
#endif
    v = 0;
    do
    :: v == N -> break
    :: else -> outcomes[v] ! s, (outcome[s] == 1); v++
    od;
    v = 0
  :: else
  fi
}

inline record(r, s, sealed_vote, digest) {
  if
  :: !got[AT(r, s)] ->
    got[AT(r, s)] = true;
    count[s]++;
    no[s] = no[s] || !sealed_vote;
    if
    :: sealed_vote && digest == 0 -> seen_0[s] = true
    :: sealed_vote && digest == 1 -> seen_1[s] = true
    :: else
    fi;
    decide(s)
  :: else
  fi
}

#define HOLDS(r, s) ((state[SLOT(r, 0)] == SEALED && held[SLOT(r, 0)] == (s)) || (state[SLOT(r, 1)] == SEALED && held[SLOT(r, 1)] == (s)))

/* Digest of a slot that holds the step. */
#define LAYOUT_OF(r, s) (HAS(r, 0, s, 1) || HAS(r, 1, s, 1))

active proctype Agent() {
  byte r, s, e;
  bool y;
  bit d;
end:
  do
  :: atomic {
      (nempty(votes[0]) || nempty(votes[1])
#if N > 2
       || nempty(votes[2])
#endif
      );
      if
      :: nempty(votes[0]) -> r = 0
      :: nempty(votes[1]) -> r = 1
#if N > 2
      :: nempty(votes[2]) -> r = 2
#endif
      fi;
      votes[r] ? s, y, d;
      if
      :: outcome[s] != 0 -> got[AT(r, s)] = true; outcomes[r] ! s, (outcome[s] == 1)
      :: else -> record(r, s, y, d)
      fi;
      /* A vote for a later step settles the earlier ones that somebody waits for: the vault says how. */
      e = 1;
      do
      :: e >= s -> break
      :: e < s && outcome[e] == 0 && count[e] > 0 && !got[AT(r, e)] -> record(r, e, HOLDS(r, e), LAYOUT_OF(r, e)); e++
      :: else -> e++
      od;
      r = 0; s = 0; e = 0; y = false; d = 0
    }
  /* Killed and started again. */
  :: atomic { agent_crashes < AGENT_CRASHES ->
      agent_crashes++;
      s = 0;
      do
      :: s > STEPS -> break
      :: else ->
        r = 0;
        do
        :: r == N -> break
        :: else -> got[AT(r, s)] = false; r++
        od;
        count[s] = 0; no[s] = false; outcome[s] = 0; seen_0[s] = false; seen_1[s] = false; s++
      od;
      r = 0;
      do
      :: r == N -> break
      :: else ->
        do
        :: votes[r] ? _, _, _
        :: empty(votes[r]) -> break
        od;
        do
        :: outcomes[r] ? _, _
        :: empty(outcomes[r]) -> break
        od;
        r++
      od;
      r = 0;
      do
      :: r == N -> break
      :: else ->
        s = base + 1;  /* keys of this incarnation only */
        do
        :: s > STEPS -> break
        :: s <= STEPS && HOLDS(r, s) -> record(r, s, true, LAYOUT_OF(r, s)); s++
        :: else -> s++
        od;
        r++
      od;
      r = 0;
      do
      :: r == N -> break
      :: else ->
        s = base + 1;
        do
        :: s > STEPS -> break
        :: s <= STEPS && open_vote[AT(r, s)] -> votes[r] ! s, yes[AT(r, s)], voted[AT(r, s)]; s++
        :: else -> s++
        od;
        r++
      od;
      r = 0; s = 0
    }
  od
}

#define MAY(k) (state[k] == FREE || aborted[k] || (state[k] == SEALED && held[k] < committed[me]))

/* A step ends on all ranks together, because it communicates: nobody begins s+1 before all have begun s. */
#if N > 2
#define ALL_AT_LEAST(s) (step[0] >= (s) && step[1] >= (s) && step[2] >= (s))
#else
#define ALL_AT_LEAST(s) (step[0] >= (s) && step[1] >= (s))
#endif

#if N > 2
#define IDLE_TOGETHER (!busy[0] && !busy[1] && !busy[2] && step[0] == step[1] && step[1] == step[2])
#else
#define IDLE_TOGETHER (!busy[0] && !busy[1] && step[0] == step[1])
#endif

inline begin_step(k) {
  step[me]++;
  busy[me] = true;
  current[me] = k;
  if
  :: k != NONE -> state[k] = WRITING; held[k] = 0; layout_of[k] = 0; aborted[k] = false
  :: else
  fi
}

inline vote_now(sealed_vote) {
  yes[AT(me, step[me])] = sealed_vote;
  open_vote[AT(me, step[me])] = true;
  votes[me] ! step[me], sealed_vote, voted[AT(me, step[me])];
  busy[me] = false;
  current[me] = NONE
}

proctype Rank(byte me) {
  byte s, i;
  bool c;
  do
  :: atomic { outcomes[me] ? s, c ->
      open_vote[AT(me, s)] = false;
      i = 0;
      do
      :: i == SLOTS -> break
      :: else ->
        if
        :: state[SLOT(me, i)] == SEALED && held[SLOT(me, i)] == s && s > base ->
          if
          :: c -> committed[me] = (s > committed[me] -> s : committed[me]);
                  newest_committed = (s > newest_committed -> s : newest_committed)
          :: !c && s > committed[me] -> aborted[SLOT(me, i)] = true
          :: else
          fi
        :: else
        fi;
        i++
      od;
      i = 0; s = 0; c = false;
      check_safe()
    }
#ifdef NO_COMMIT_EXCHANGE
  /* The mutation: the older slot, whatever is known of the newer. */
  :: atomic { !busy[me] && step[me] < STEPS && ALL_AT_LEAST(step[me]) &&
              (state[SLOT(me, 0)] == FREE || (state[SLOT(me, 1)] != FREE && held[SLOT(me, 0)] < held[SLOT(me, 1)])) ->
      begin_step(SLOT(me, 0)); check_safe() }
  :: atomic { !busy[me] && step[me] < STEPS && ALL_AT_LEAST(step[me]) &&
              !(state[SLOT(me, 0)] == FREE || (state[SLOT(me, 1)] != FREE && held[SLOT(me, 0)] < held[SLOT(me, 1)])) ->
      begin_step(SLOT(me, 1)); check_safe() }
#else
  :: atomic { !busy[me] && step[me] < STEPS && ALL_AT_LEAST(step[me]) && MAY(SLOT(me, 0)) ->
      begin_step(SLOT(me, 0)); check_safe() }
  :: atomic { !busy[me] && step[me] < STEPS && ALL_AT_LEAST(step[me]) && MAY(SLOT(me, 1)) ->
      begin_step(SLOT(me, 1)); check_safe() }
  /* Waited too long for an outcome: this step goes without a snapshot. */
  :: atomic { timeout && !busy[me] && step[me] < STEPS && ALL_AT_LEAST(step[me]) && !MAY(SLOT(me, 0)) && !MAY(SLOT(me, 1)) ->
      /* … because nothing moves any more, */
      assert(agent_crashes > 0); irregular = true; begin_step(NONE) }
  :: atomic { !busy[me] && step[me] < STEPS && ALL_AT_LEAST(step[me]) && !MAY(SLOT(me, 0)) && !MAY(SLOT(me, 1)) && drops < DROPS ->
      /* … or because it is slow. */
      drops++; irregular = true; begin_step(NONE) }
#endif
  :: atomic { busy[me] && current[me] != NONE && state[current[me]] == WRITING ->
      state[current[me]] = SEALED; held[current[me]] = step[me];
      layout_of[current[me]] = layout[me]; voted[AT(me, step[me])] = layout[me];
      sealed_ever[AT(me, step[me])] = true;
      note_completed(step[me]);
      check_safe() }
  :: atomic { busy[me] && current[me] != NONE && state[current[me]] == WRITING && drops < DROPS ->
      drops++; irregular = true; state[current[me]] = FREE; vote_now(false) }
  :: atomic { busy[me] && current[me] != NONE && state[current[me]] == SEALED -> vote_now(true) }
  :: atomic { busy[me] && current[me] == NONE -> vote_now(false) }
  /* State appears on this rank alone. Its current slot, if any, has the table of before. */
  :: atomic { !busy[me] && changes < CHANGES && step[me] < STEPS ->
      changes++; irregular = true; layout[me] = 1 - layout[me] }
  /* All plan together, at one point of the program. */
  :: atomic { layout[0] != layout[N - 1] && IDLE_TOGETHER ->
      i = 0;
      do
      :: i == N -> break
      :: else -> layout[i] = 0; i++
      od;
      i = 0 }
  :: step[me] == STEPS && !busy[me] && empty(outcomes[me]) && crashes == CRASHES && agent_crashes == AGENT_CRASHES -> break
  od
}

/* All ranks are killed and started again: vaults stay, and the newest step that all of them have goes on. */
proctype Job() {
  byte r, s;
end:
  do
  :: atomic { crashes < CRASHES ->
      crashes++;
      newest_common();
      base = w;
      newest_committed = w; completed = w; irregular = false; w = 0;
      r = 0;
      do
      :: r == N -> break
      :: else ->
        layout[r] = 0;
        step[r] = base; busy[r] = false; current[r] = NONE; committed[r] = base;
        s = 0;
        do
        :: s == SLOTS -> break
        :: else ->
          aborted[SLOT(r, s)] = false;
          if
          :: state[SLOT(r, s)] == SEALED && held[SLOT(r, s)] == base && base > 0
          :: else -> state[SLOT(r, s)] = FREE; held[SLOT(r, s)] = 0; layout_of[SLOT(r, s)] = 0
          fi;
          s++
        od;
        do
        :: votes[r] ? _, _, _
        :: empty(votes[r]) -> break
        od;
        do
        :: outcomes[r] ? _, _
        :: empty(outcomes[r]) -> break
        od;
        s = 0;
        do
        :: s > STEPS -> break
        :: else ->
          open_vote[AT(r, s)] = false; yes[AT(r, s)] = false; sealed_ever[AT(r, s)] = false; got[AT(r, s)] = false;
          voted[AT(r, s)] = 0; seen_0[s] = false; seen_1[s] = false;
          count[s] = 0; no[s] = false; outcome[s] = 0; s++
        od;
        r++
      od;
      r = 0; s = 0
    }
  :: crashes == CRASHES -> break
  od
}

init {
  atomic {
    byte r = 0;
    do
    :: r == N -> break
    :: else -> current[r] = NONE; run Rank(r); r++
    od;
    r = 0;
    run Job()
  }
}
