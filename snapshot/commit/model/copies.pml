/* Copies of slots on another node (agent/mesh/{copy_gate,copy_store}.h) for the model checker spin: what the loss of a node
 * leaves behind.
 *
 * Two nodes with a rank each; each node keeps copies of the other one's slots. A rank seals a step in one of its two slots; the
 * other node takes it into a slot that its rule allows to overwrite, and only then the rank's vote counts. The step is committed
 * when both votes are there. At any point all processes may be killed and started again, or a node may be lost with all that
 * it holds, and be replaced by an empty one: the job starts again from the newest step that is there for both ranks.
 *
 * Checked after every change of what is held: if the step before a start of the job counts as committed, and any step that was
 * committed since does,
 *   - the loss of either node leaves a step that is not older than the newest committed one, once a step was committed since the start;
 *   - before that, the loss of the node that was lost last does.
 * No deadlock: all steps are committed in the end.
 *
 * -DNO_GATE: a mutation. Votes do not wait for copies: the assertions must fail.
 * -DNO_THIRD: another. A copy of the attempt before may be overwritten before this one has committed: they must fail.
 * -DONLY_COMMITTED: another. Of this attempt, only the copy of the newest committed step that the rank knows of is kept: they
 *   must fail, for the next step may be sealed before the rank hears of a commit.
 */
#ifndef STEPS
#define STEPS 4
#endif
#ifndef LOSSES
#define LOSSES 2
#endif
#ifndef KILLS
#define KILLS 1
#endif

#define OWN 2
#define THERE 3
#define O(n, i) ((n) * OWN + (i))
#define C(n, i) ((n) * THERE + (i))
#define NONE 255

/* Step and attempt that a slot holds; step 0: nothing. own: of rank n. copy: of rank n, on the other node. */
byte own_step[2 * OWN], own_try[2 * OWN];
byte copy_step[2 * THERE], copy_try[2 * THERE];
byte taking[2];                  /* slot that a copy of rank n is being written to */
byte step[2];                    /* newest that rank n has begun */
byte current[2];                 /* slot that it writes, NONE: none */
bool voted[2];                   /* for its newest step */
byte known[2];                   /* newest committed step that node n knows of, of this attempt or its base */
bool since[2];                   /* it is of this attempt */

byte attempt = 1, base, newest, losses, kills, lost_last = NONE;
bool any;                        /* a step of this attempt was committed */
byte t, u, w, x;                 /* scratch, always left at 0 */

#define OWN_HAS(n, s, a) ((own_step[O(n, 0)] == (s) && own_try[O(n, 0)] == (a)) || (own_step[O(n, 1)] == (s) && own_try[O(n, 1)] == (a)))
#define COPY_HAS(n, s, a) ((copy_step[C(n, 0)] == (s) && copy_try[C(n, 0)] == (a)) || (copy_step[C(n, 1)] == (s) && copy_try[C(n, 1)] == (a)) || (copy_step[C(n, 2)] == (s) && copy_try[C(n, 2)] == (a)))

/* → w: the newest step that is left for both if node n is lost; 0: none. x: its attempt. */
inline left_without(n) {
  w = 0; x = 0; t = 1;
  do
  :: t > STEPS -> break
  :: else ->
    u = 1;
    do
    :: u > attempt -> break
    :: else ->
      if
      :: OWN_HAS(1 - (n), t, u) && COPY_HAS(n, t, u) -> w = t; x = u
      :: else
      fi;
      u++
    od;
    t++
  od;
  t = 0; u = 0
}

/* → w, x: as above, if no node is lost. */
inline left() {
  w = 0; x = 0; t = 1;
  do
  :: t > STEPS -> break
  :: else ->
    u = 1;
    do
    :: u > attempt -> break
    :: else ->
      if
      :: OWN_HAS(0, t, u) && OWN_HAS(1, t, u) -> w = t; x = u
      :: else
      fi;
      u++
    od;
    t++
  od;
  t = 0; u = 0
}

inline check() {
  if
  :: any || lost_last == 0 -> left_without(0); assert(w >= newest)
  :: else
  fi;
  if
  :: any || lost_last == 1 -> left_without(1); assert(w >= newest)
  :: else
  fi;
  w = 0; x = 0
}

/* A slot of rank n that may be overwritten: what is in use is the newest committed step, and the one that has no outcome. */
#define MAY(n, i) (own_step[O(n, i)] == 0 || own_step[O(n, i)] < known[n] || (own_step[O(n, i)] == known[n] && own_try[O(n, i)] != attempt && since[n]))
#ifdef NO_GATE
#define COPIED(n) true
#else
#define COPIED(n) COPY_HAS(n, step[n], attempt)
#endif
#define ENDED(n) (current[n] == NONE && voted[n])

/* What a copy's slot holds may still be needed (isNeeded() in copy_store.cc): the rank still has it, or it is of an attempt
 * before and this one has committed nothing that the rank knows of. */
#ifdef NO_THIRD
#define EARLIER(n, i) false
#else
#define EARLIER(n, i) (!since[n] && copy_try[C(n, i)] != attempt)
#endif
#ifdef ONLY_COMMITTED
#define STILL(n, i) (since[n] && copy_try[C(n, i)] == attempt && copy_step[C(n, i)] == known[n])
#else
#define STILL(n, i) ((own_step[O(n, 0)] == copy_step[C(n, i)] && own_try[O(n, 0)] == copy_try[C(n, i)]) || (own_step[O(n, 1)] == copy_step[C(n, i)] && own_try[O(n, 1)] == copy_try[C(n, i)]))
#endif
#define NEEDED(n, i) (STILL(n, i) || EARLIER(n, i))
#define FREE_COPY(n, i) (copy_step[C(n, i)] == 0)
#define USED(n) (!FREE_COPY(n, 0) + !FREE_COPY(n, 1) + !FREE_COPY(n, 2))

/* → x: the slot that a copy goes to, NONE: none (choose() in copy_store.cc). */
inline choose(n) {
  x = NONE; t = 0; w = NONE;
  do
  :: t == THERE -> break
  :: else ->
    if
    :: FREE_COPY(n, t) -> w = (w == NONE -> t : w)
    :: !FREE_COPY(n, t) && !NEEDED(n, t) && (x == NONE || copy_step[C(n, t)] < copy_step[C(n, x)]) -> x = t
    :: else
    fi;
    t++
  od;
  if
  :: x != NONE && (USED(n) >= 2 || w == NONE)
  :: x != NONE && !(USED(n) >= 2 || w == NONE) -> x = w
  :: x == NONE -> x = w
  fi;
  t = 0; w = 0
}

/* The slot of rank n that node 1-n has not, NONE: none: the older one first. */
inline wanted(n) {
  x = NONE; t = 0;
  do
  :: t == OWN -> break
  :: else ->
    if
    :: own_step[O(n, t)] != 0 && t != current[n] && !COPY_HAS(n, own_step[O(n, t)], own_try[O(n, t)]) && (x == NONE || own_step[O(n, t)] < own_step[O(n, x)]) -> x = t
    :: else
    fi;
    t++
  od;
  t = 0
}

byte source[2];                  /* slot of rank n that is being copied */

inline restart() {               /* from step w of attempt x */
  attempt++;
  base = w; newest = w; any = false;
  t = 0;
  do
  :: t == 2 -> break
  :: else ->
    step[t] = base; current[t] = NONE; voted[t] = true; known[t] = base; since[t] = false; taking[t] = NONE; source[t] = NONE;
    u = 0;
    do
    :: u == OWN -> break
    :: else ->
      if
      :: own_step[O(t, u)] == w && own_try[O(t, u)] == x && w > 0
      :: else -> own_step[O(t, u)] = 0; own_try[O(t, u)] = 0
      fi;
      u++
    od;
    t++
  od;
  t = 0; u = 0; w = 0; x = 0
}

proctype Node(byte me) {
  do
  /* A step begins on both ranks together, because it communicates. */
  :: atomic { ENDED(me) && step[me] < STEPS && step[me] <= step[1 - me] && MAY(me, 0) ->
      step[me]++; current[me] = 0; own_step[O(me, 0)] = 0; own_try[O(me, 0)] = 0; voted[me] = false; check() }
  :: atomic { ENDED(me) && step[me] < STEPS && step[me] <= step[1 - me] && MAY(me, 1) ->
      step[me]++; current[me] = 1; own_step[O(me, 1)] = 0; own_try[O(me, 1)] = 0; voted[me] = false; check() }
  /* It is sealed. */
  :: atomic { current[me] != NONE ->
      own_step[O(me, current[me])] = step[me]; own_try[O(me, current[me])] = attempt; current[me] = NONE; check() }
  /* The other node begins to take a slot, and has it. */
  :: atomic { taking[me] == NONE ->
      wanted(me);
      if
      :: x != NONE ->
        source[me] = x; choose(me);
        if
        :: x != NONE -> taking[me] = x; copy_step[C(me, x)] = 0; copy_try[C(me, x)] = 0
        :: else -> source[me] = NONE
        fi
      :: else
      fi;
      x = 0; check() }
  :: atomic { taking[me] != NONE ->
      if
      :: own_step[O(me, source[me])] != 0 && source[me] != current[me] ->
        copy_step[C(me, taking[me])] = own_step[O(me, source[me])]; copy_try[C(me, taking[me])] = own_try[O(me, source[me])]
      :: else  /* overwritten meanwhile: its hashes do not match */
      fi;
      taking[me] = NONE; source[me] = NONE;
      check() }
  /* Its vote counts. */
  :: atomic { current[me] == NONE && !voted[me] && COPIED(me) -> voted[me] = true }
  /* Both votes are there, and this node hears of it. */
  :: atomic { step[0] == step[1] && voted[0] && voted[1] && step[me] > base && known[me] < step[me] ->
      known[me] = step[me]; since[me] = true; newest = step[me]; any = true; check() }
  :: atomic { since[me] && step[me] > step[1 - me] && known[me] < step[1 - me] -> known[me] = step[1 - me] }
  :: step[me] == STEPS && known[me] == STEPS && losses == LOSSES && kills == KILLS -> break
  od
}

proctype World() {
end:
  do
  :: atomic { losses < LOSSES && (any || lost_last == 0 || newest == 0) -> losses++;
      left_without(0); lost_last = 0;
      own_step[O(0, 0)] = 0; own_step[O(0, 1)] = 0; own_try[O(0, 0)] = 0; own_try[O(0, 1)] = 0;
      copy_step[C(1, 0)] = 0; copy_step[C(1, 1)] = 0; copy_step[C(1, 2)] = 0;
      copy_try[C(1, 0)] = 0; copy_try[C(1, 1)] = 0; copy_try[C(1, 2)] = 0;
      restart(); check() }
  :: atomic { losses < LOSSES && (any || lost_last == 1 || newest == 0) -> losses++;
      left_without(1); lost_last = 1;
      own_step[O(1, 0)] = 0; own_step[O(1, 1)] = 0; own_try[O(1, 0)] = 0; own_try[O(1, 1)] = 0;
      copy_step[C(0, 0)] = 0; copy_step[C(0, 1)] = 0; copy_step[C(0, 2)] = 0;
      copy_try[C(0, 0)] = 0; copy_try[C(0, 1)] = 0; copy_try[C(0, 2)] = 0;
      restart(); check() }
  :: atomic { kills < KILLS -> kills++;
      left();
      if
      :: w >= newest -> lost_last = NONE; restart(); check()
      :: else -> w = 0; x = 0   /* the own vault of a rank that was lost has nothing yet */
      fi }
  :: losses == LOSSES && kills == KILLS -> break
  od
}

init {
  atomic {
    taking[0] = NONE; taking[1] = NONE; source[0] = NONE; source[1] = NONE;
    current[0] = NONE; current[1] = NONE; voted[0] = true; voted[1] = true;
    run Node(0); run Node(1); run World()
  }
}
