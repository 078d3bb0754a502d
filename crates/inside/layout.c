/*
 * Prints what PostgreSQL's headers say of layouts and numbers that braid_postgres::layout has by
 * hand: a line "NAME VALUE" each. Compiled for the server's major by scripts/check-inside.
 */
#include "postgres.h"

/* Members of Port that come later need headers that a machine may lack. */
#undef ENABLE_GSS
#undef USE_OPENSSL
#undef USE_SSL

#include "access/nbtree.h"
#include "access/skey.h"
#include "libpq/libpq-be.h"
#include "libpq/libpq.h"
#include "storage/bufmgr.h"
#include "storage/bufpage.h"
#include "storage/lwlock.h"
#include "utils/timeout.h"

#undef printf
#define MEMBER(type, member) printf("%s.%s %zu\n", #type, #member, offsetof(type, member))
#define VALUE(value) printf("%s %zu\n", #value, (size_t) (value))

/* Stands for the server's, so that a lock's place in it can be told. */
LWLockPadded *MainLWLockArray;

int
main(void)
{
	printf("AddinShmemInitLock %zu\n",
		   (size_t) ((char *) AddinShmemInitLock - (char *) MainLWLockArray) / sizeof(LWLockPadded));

	MEMBER(BTScanInsertData, heapkeyspace);
	MEMBER(BTScanInsertData, allequalimage);
	MEMBER(BTScanInsertData, anynullkeys);
	MEMBER(BTScanInsertData, scantid);
	MEMBER(BTScanInsertData, keysz);
	MEMBER(BTScanInsertData, scankeys);
	VALUE(sizeof(ScanKeyData));

	MEMBER(BTPageOpaqueData, btpo_prev);
	MEMBER(BTPageOpaqueData, btpo_next);
	MEMBER(BTPageOpaqueData, btpo_level);
	MEMBER(BTPageOpaqueData, btpo_flags);
	MEMBER(BTPageOpaqueData, btpo_cycleid);
	VALUE(sizeof(BTPageOpaqueData));
	VALUE(SK_ISNULL);
	VALUE(BTP_LEAF);
	VALUE(BTP_DELETED | BTP_HALF_DEAD);

	MEMBER(PQcommMethods, comm_reset);
	MEMBER(PQcommMethods, flush);
	MEMBER(PQcommMethods, flush_if_writable);
	MEMBER(PQcommMethods, is_send_pending);
	MEMBER(PQcommMethods, putmessage);
	MEMBER(PQcommMethods, putmessage_noblock);
	VALUE(sizeof(PQcommMethods));
	MEMBER(Port, sock);
	MEMBER(Port, noblock);

	VALUE(BUFFER_LOCK_UNLOCK);
	VALUE(BUFFER_LOCK_SHARE);
	VALUE(BUFFER_LOCK_EXCLUSIVE);
	VALUE(SizeOfPageHeaderData);
	VALUE(sizeof(ItemIdData));
	VALUE(LP_NORMAL);

	VALUE(USER_TIMEOUT);
	return 0;
}
