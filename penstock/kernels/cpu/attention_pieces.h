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

// Pieces may run in any order and at the same time; merges run after all pieces. The pieces of an item read the same
// keys, and one thread runs them one after the other, so that the keys stay in the cache of the thread. The object is
// kept from call to call to reuse the memory.
struct AttentionPieces {
  std::vector<QueryTile> pieces;
  std::vector<int64_t> items;  // the first piece of each, and the number of all pieces
  std::vector<RowState> states;  // of the pieces that leave one
  std::vector<StateRows> parts;
  std::vector<Merge> merges;
  Scratch outputs;
};

// Cuts the attention of a step into pieces. Blocks that neighbouring requests of one token each have in common at
// their beginning are read once for all of these requests. With too few tiles for all threads, several threads share
// a tile over a long context.
void cut_attention(const AttendCall& call, int64_t num_threads, AttentionPieces* into);

// Collects the states of a merge in the form that merge_tile reads.
void collect_states(const AttendCall& call, const AttentionPieces& from, const Merge& merge, RowState* states);

}  // namespace penstock
