// How the attention of a step is cut into pieces of work.
#pragma once

#include <vector>

#include "attention.h"

namespace penstock {

// Rows of a piece's state that belong to a tile.
struct StateRows {
  int64_t piece;
  int64_t first_row;
};

// A tile whose states lie in several pieces, to be merged in the order given.
struct Merge {
  QueryTile tile;
  size_t first_part;
  size_t num_parts;
};

// Pieces may run in any order and at the same time, then merges. Those of an item read the same keys, and find them in
// the cache of the thread that runs them one after the other. Kept from call to call for its memory.
struct AttentionPieces {
  std::vector<QueryTile> pieces;
  std::vector<int64_t> items;  // the first piece of each, and the number of all pieces
  std::vector<RowState> states;  // of the pieces that leave one
  std::vector<StateRows> parts;
  std::vector<Merge> merges;
  Scratch outputs;
};

// Neighbouring requests of one token each that begin with the same blocks have those read once for all of them; a
// tile over a long context is shared between threads where there are too few tiles.
void cut_attention(const AttendCall& call, int64_t num_threads, AttentionPieces* into);

// The states of a merge, as merge_tile takes them.
void collect_states(const AttendCall& call, const AttentionPieces& from, const Merge& merge, RowState* states);

}  // namespace penstock
